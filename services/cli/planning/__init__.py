"""The command `penstock plan`: cascade plans made offline, exported, applied and shown."""
