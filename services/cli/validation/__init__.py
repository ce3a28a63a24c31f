"""Parts of `penstock validate`, which compares the simulator with published and with live measurements."""
