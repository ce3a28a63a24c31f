"""How a worker learns how many tokens its requests will still generate, every k engine steps (STAR, section 4.3).

    engine: hidden states --> loop --Predict--> length predictor
                               |  <--------------'      (no answer: the fallback of `controlplane/prediction`)
                               v
                     request table --> reports to the monitor, for whoever moves requests

Nothing here is waited for by the engine: states that come while a call is under way replace those that wait.
"""
