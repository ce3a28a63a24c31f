"""`penstock predictor`: collect samples, train, evaluate and serve a length predictor."""
