"""Requirements that a rule can have, by name."""

NEEDS = {
    "individual": "its server half reads single updates; without it sums suffice, as under secure aggregation",
    "sent_model": "each update comes with the model that its client was sent, as update.start",
    "sent_statistics": "it comes with the statistics that its client was sent, as update.b_start, where these are averaged "
    "and all of the model travels; sums then tell how far statistics moved, as aggregate.moved",
    "last_update": "it comes with the client's last update before it, as update.last",
    "same_round": "updates that were sent out in an earlier round are discarded",
    "full_gradient": "ctx.full_gradient, which takes a pass over all of the client's data",
    "optimizer": "the optimizer's state stays at the client from round to round, neither averaged nor reset",
    "mean_model": "what is evaluated is the mean of the clients' whole models, slices that did not travel included",
    "final_training": "clients train once more from the final model, and are served by what they then have",
}
