"""Names of options in other libraries; used only for suggestions in error messages."""

from __future__ import annotations

_NAMES = {
    "lr": "learning_rate eta local_lr client_lr local_learning_rate client_learning_rate",
    "local_epochs": "epochs epoch local_ep num_epochs n_epochs client_epochs",
    "local_steps": "steps local_iterations local_updates num_steps",
    "batch_size": "batch bs local_bs local_batch_size train_batch_size",
    "rounds": "num_rounds n_rounds comm_rounds comm_round communication_rounds global_rounds global_epochs",
    "clients": "num_clients n_clients client_num total_clients num_users n_users",
    "participation": "frac fraction fraction_fit client_fraction join_ratio participation_rate sample_rate",
    "method": "algorithm algo strategy aggregator aggregation",
    "data": "dataset data_set dataset_name",
    "data_path": "data_dir data_root root",
    "partition": "split partitioner partition_method",
    "model": "model_name architecture arch net",
    "label": "target_column target_col label_column",
    "weight_decay": "wd l2",
    "seed": "random_seed random_state",
    "device": "gpu cuda use_gpu",
    "workers": "num_workers n_workers",
    "metrics": "metric",
    "early_stopping": "early_stop",
    "partition=dirichlet:ALPHA": "alpha dirichlet_alpha dir_alpha",
    "method=fedprox:mu=MU": "mu prox_mu proximal_mu",
}
OF_OTHERS = {other: ours for ours, others in _NAMES.items() for other in others.split()}
"""Name of an option in unskew, optionally with a value, by its name in other libraries."""
