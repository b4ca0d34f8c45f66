"""The REST API: one router per audience. Handlers record facts and show state; they never move a round."""
