"""`penstock chaos`: break workers under running streams and check every answer."""
