"""Former names of options, and names in other libraries; used only for suggestions in error messages."""

from __future__ import annotations

_NAMES = {
    "max_train_samples": "keep_samples",
    "max_classes": "keep_classes",
    "reserve_test_samples": "set_aside",
    "base_run": "to_be_continued",
    "server_data": "server",
    "server_data_path": "server_path",
    "client_weighting": "weights",
    "clients_per_group": "together",
    "stall_warning_seconds": "patience",
    "clip_grad_norm": "clip",
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
OF_OTHERS = {other: ours for ours, others in _NAMES.items() for other in others.split()} | {
    "again": "resume",
    "each": "overrides",
    "follow": "callback_factory",
    "path": "data_path",
    "shares": "synthetic_fractions",
    "space": "search_space",
}
"""Name of an option in unskew, optionally with a value, by its name in other libraries or in earlier versions."""

FORMER_FIELDS = {"keep_samples", "patience", "server", "together", "weights"}
"""Former fields that ``config.yaml`` of every run folder from earlier versions contains."""

FORMER_FLAGS = {
    "network": "delay",
    "gathering": "startup-timeout",
    "deadline": "round-timeout",
    "least": "min-updates",
    "short": "on-timeout",
    "faults": "max-invalid-replies",
    "megabytes": "max-message-mb",
    "norm": "max-norm",
    "traffic": "max-traffic",
    "p": "synthetic-fraction",
    "try": "validate-minutes",
}
"""Current names of renamed flags that are not configuration fields."""

FORMER_HOOKS = {
    "refuses": "conflict_with",
    "moves": "trainable_mask",
    "sends": "transform_update",
    "packed": "encode",
    "extras": "download",
    "collect": "server_update",
    "travels": "exchanged_slices",
    **dict.fromkeys(("exchanged", "round_metrics"), "metrics"),
    **dict.fromkeys(("summary_fields", "client_fields", "stop_reason"), "report"),
    **dict.fromkeys(("of_client", "for_client", "prepare"), "client_payload"),
    "build": "slots",
    "buffer": "updates_per_step",
    "personal": "has_personal_model",
    "own": "local_slices",
    "contribute": "client_payload",
    "deal": "server_payload",
    "receive": "apply_payload",
    "facts": "client_info",
    "figures": "summary_metrics",
}
"""Current names of renamed hooks and attributes of rules."""
