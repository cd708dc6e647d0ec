"""Validation of a method against data, model, optimizer and network of a run, before anything is trained."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence
from functools import partial

from unskew.attacks.attackers import check_attack, draw_attackers
from unskew.attacks.registry import Attack, LabelFlip
from unskew.config.experiment import AT_CLIENTS, OF_ONE_ROUND, Experiment
from unskew.data.federation import Federation
from unskew.data.spec import parse_split
from unskew.data.validation import check_tokens
from unskew.errors import ConfigError, MethodConflictError, unknown_name
from unskew.methods.dp_sites import site_noise
from unskew.methods.fedavg import server_rule
from unskew.methods.registry import METHODS, REFERENCES
from unskew.models.names import split_models
from unskew.models.registry import MODELS
from unskew.option_parsing import check_options_have_effect, option_defaults
from unskew.protocol.client_sampler import ClientSampler
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.requirements import NEEDS, why_tasks
from unskew.protocol.rules import AggregateRule, ClientRule, DataRule, Method, Rule, ServerRule, SyncRule, Weights
from unskew.protocol.run_context import PreRunContext
from unskew.runs.build_model import ModelLike, initial_spec
from unskew.runs.coefficients import check_coefficients
from unskew.runs.metrics import objective_warnings, run_metrics
from unskew.runs.resolved_run import ResolvedRun
from unskew.runs.round_plan import make_round_plan
from unskew.simulation.parameter_slices import SliceExchange
from unskew.simulation.samplers.registry import SAMPLERS, parse_sampling
from unskew.tasks.registry import tasks_with


def resolve_run(config: Experiment, federation: Federation, model: ModelLike | None, method: Method) -> ResolvedRun:
    """Resolve the configuration of a run, and validate that the method fits the data, the model and the server.

    Args:
        config: Configuration of the run.
        federation: Data of all clients.
        model: Model that was passed in Python, or None.
        method: Method of the run.

    Raises:
        ConfigError: If the method does not fit the data, the model, the optimizer or the server.
        MethodConflictError: If the method reads individual updates, which secure aggregation forbids.
    """
    check_task(method, federation)
    check_unweighted(config, method)
    if config.augment and len(federation.shape) != 3:
        raise ConfigError(
            f"augment crops and flips images, but the inputs have the shape {federation.shape}. Remove it."
        )
    metrics = run_metrics(config, federation)
    warnings = objective_warnings(metrics, config, federation)
    if config.attack is not None:
        if method.name in REFERENCES:
            raise ConfigError(f"{method.name} trains without a server that clients could attack. Remove attack.")
        if site_noise(method) is not None and config.attack.kind != "labelflip":
            raise ConfigError(
                f"The attack {config.attack.kind} replaces updates, but with dp:noise_at=sites clients send noisy integers. "
                "Use labelflip, or noise_at=server."
            )
        check_attackable(config.attack, method)
    of_clients = [name for name in config.diagnose if name in AT_CLIENTS]
    agreed = config.category_values
    coded = [
        encoder.name for encoder in federation.encoders if encoder.kind == "category" and encoder.name not in agreed
    ]
    if config.secure_aggregation == "required":
        check_sums_suffice(method, of_clients)
        if coded:
            raise ConfigError(
                f"The server learns which values of the category {coded[0]!r} each client has, but "
                "secure_aggregation=required lets it see only sums. List the values in the experiment (categories: "
                f"{{{coded[0]}: [a, b]}}), exclude the column (--exclude {coded[0]}), or turn secure aggregation off."
            )
    if config.coefficients:
        check_coefficients(config, federation, model is None)
    run = PreRunContext(
        federation=federation,
        build=partial(initial_spec, config, federation, model, method),
        plan=make_round_plan(config, len(federation.clients), method),
        delayed=config.network.delay != "none",
        diagnose=config.diagnose,
        base_run=config.base_run,
        client_weighting=config.client_weighting,
        buffers=config.buffers,
        save_samples=config.save_samples,
        # At a real server, only the configuration names it.
        split_group=federation.split_group if config.split_by is None else parse_split(config.split_by).group,
    )
    if callable(method.weights) and config.client_weighting != "auto":
        raise ConfigError(
            f"{method.name} computes the weights of clients, so client_weighting={config.client_weighting} contradicts it. "
            "Remove client_weighting."
        )
    warnings += check_sampling(config, run, method)
    if config.attack is not None:
        warnings += check_attack(config.attack, federation, config.seed, run.plan.cohort)
        warnings += unsuspected_attackers(config, federation, method)
    for rule in method.rules:
        if run.delayed and not rule.supports_delays:
            raise ConfigError(
                f"{rule.name} needs all updates of a round in the same round and cannot be combined with network.delay."
            )
        check_options_have_effect(rule)
        notes = rule.check(run) or ()
        if "logits_of_head" in rule.needs:
            run.need_logits_of_head(rule.name)
        warnings += [notes] if isinstance(notes, str) else notes
        warnings += misspelled_hooks(rule)
    names = split_models(config.model) if coded and model is None else []
    unread = next((name for name in names if name in MODELS and not MODELS[name].reads_categories), None)
    if unread is not None:
        warnings.append(
            f"{unread} treats the category codes of {', '.join(coded)} as numbers, which are rarely meaningful. Use "
            "logistic or table-mlp, which learn weights for each category."
        )
    spec = run.spec
    unseeded = next((each.unseeded_layer for each in spec.architectures if each.unseeded_layer is not None), None)
    if unseeded is not None:
        warnings.append(
            f"Another engine, or a resumed run, gives other numbers: the outputs of the model, from {unseeded} "
            "on, differ between two passes with the same inputs and seed. The model has a random generator or a counter of "
            "its own. Draw from the global generators instead, as torch.rand does."
        )
    models, clients = len(spec.architectures), max(len(federation.clients), len(federation.unseen))
    if models > clients:
        warnings.append(
            f"The last {models - clients} of {models} models are not used, because there are {clients} clients and each has "
            "one model, in order."
        )
    of_one_round = [name for name in of_clients if name in OF_ONE_ROUND]
    late = config.network.deadline is not None and accepts_late_updates(method)
    if of_one_round and (run.delayed or late):
        which = "network.delay" if run.delayed else "network.deadline"
        raise ConfigError(
            f"diagnose={of_one_round[0]} compares the clients of one round and does not support {which}. Remove one."
        )
    if spec.others and config.secure_aggregation == "required":
        raise ConfigError(
            "secure_aggregation=required sums updates of one model, but the clients have several. Use one model, or turn it "
            "off."
        )
    if spec.others and of_clients:
        raise ConfigError(
            f"diagnose={of_clients[0]} compares models or updates of clients, which here have different architectures. "
            "Remove it."
        )
    modules = [each.module for each in spec.architectures]
    known = [getattr(module, "tokens", None) for module in modules]
    tokens = min((count for count in known if isinstance(count, int)), default=None)
    if tokens is not None:
        packed = any(getattr(module, "packed", False) for module in modules)
        for k, client in enumerate(federation.clients):
            check_tokens(client.x, tokens, f"client {k}", packed)
        check_tokens(federation.test[0], tokens, "the test set", packed)
    if method.sync is not None:
        half = method.sync.server_init(spec.flatten(), FederationInfo.of(federation))
        method.sync.exchanged_slices(half, 0, 0, None, spec)
        if method.needs("equal_slices"):
            exchange = SliceExchange(method.sync, spec)
            exchange.check_equal_slices({method.sync.name: half}, 0, {}, len(federation.clients))
    weights = resolve_weighting(config, method)
    return ResolvedRun(config, method, federation, spec, run.plan, weights, metrics, late, tuple(warnings))


def check_sampling(config: Experiment, run: PreRunContext, method: Method) -> list[str]:
    """Validate the sampler of the clients; returns warnings.

    Args:
        config: Configuration of the run.
        run: Run to check.
        method: Method of the run.

    Raises:
        ConfigError: If the options of the sampler do not fit, nobody may learn what it reads, or clients do not have the
            model whose loss it asks for.
    """
    sampler = parse_sampling(config.sampling)
    sampler.check(run.plan)
    check_timed_options(sampler, config)
    warnings = misspelled_hooks(sampler)
    if not (sampler.asks_loss or sampler.reads_reports):
        return warnings
    if sampler.asks_loss and method.sync is not None and method.sync.trains_sub_models:
        raise ConfigError(
            f"sampling={sampler.name} asks clients for the loss of the model, but clients of {method.sync.name} have only "
            "a part of it. Use sampling=oort, which reads training losses, or fixed."
        )
    if run.plan.masked:
        run.need_no_reports("secure_aggregation=required")
    if sampler.name in SAMPLERS and run.plan.cohort == run.plan.clients:
        return [
            *warnings,
            f"sampling={sampler.name} has no effect, because all clients take part in each round. Use sampling=fixed, or a "
            "participation below 1.",
        ]
    return [
        *warnings,
        f"With {sampler.name} the cohorts depend on the model, so methods are not compared on the same cohorts.",
    ]


def check_timed_options(sampler: ClientSampler, config: Experiment) -> None:
    """Validate that options for simulated time have their defaults if there is none.

    Args:
        sampler: Sampler of the run.
        config: Configuration of the run.

    Raises:
        ConfigError: If an option without an effect has another value than its default.
    """
    if config.network.timed:
        return
    defaults = option_defaults(type(sampler))
    option = next((name for name in sampler.timed_options if getattr(sampler, name) != defaults[name]), None)
    if option is not None:
        raise ConfigError(
            f"{sampler.name}:{option} has no effect without simulated time. Remove it, or set the speed of the clients, such "
            "as network.compute."
        )


def accepts_late_updates(method: Method) -> bool:
    """Return whether a method uses updates that arrive in a later round than their broadcast."""
    return all(rule.supports_delays and "same_round" not in rule.needs for rule in (server_rule(method), *method.rules))


def check_attackable(attack: Attack, method: Method) -> None:
    """Validate that clients send what the attack changes.

    Args:
        attack: Options of the attack.
        method: Method of the run.

    Raises:
        ConfigError: If the attack changes updates, and no client sends one.
    """
    if isinstance(attack, LabelFlip):
        return
    if method.server is not None and method.server.steps_without == "clients":
        raise ConfigError(f"{method.server.name} trains without clients, so nobody could attack. Remove attack.")
    without_model = next((rule.name for rule in method.client if not rule.sends_model), None)
    if without_model is not None:
        raise ConfigError(
            f"The attack {attack.kind} changes updates of the model, and clients of {without_model} send none. Use "
            "labelflip, or another method."
        )


def unsuspected_attackers(config: Experiment, federation: Federation, method: Method) -> list[str]:
    """Return a warning if more clients attack than a robust method suspects.

    Args:
        config: Configuration of the run, with an attack.
        federation: Data of all clients.
        method: Method of the run.
    """
    assert config.attack is not None
    share = getattr(method.aggregate, "share", None)
    attacking = len(draw_attackers(config.attack, len(federation.clients), config.seed)) / len(federation.clients)
    if share is None or method.aggregate is None or attacking <= share + 1e-9:
        return []
    return [
        f"{attacking:.0%} of the clients attack, but {method.aggregate.name} suspects only {share:.0%}. Use a larger share, "
        "or another robust method."
    ]


def resolve_weighting(config: Experiment, method: Method) -> Weights:
    """Return the configured client weighting, or with ``auto`` that of the method.

    Args:
        config: Configuration of the run.
        method: Method of the run.
    """
    if config.client_weighting != "auto":
        return config.client_weighting
    return method.weights or server_rule(method).weights or "samples"


def check_task(method: Method, federation: Federation) -> None:
    """Validate that all rules support the task and have valid declarations.

    Args:
        method: Method of the run.
        federation: Data of all clients.

    Raises:
        ConfigError: If a rule does not support the task, or declares unknown needs.
    """
    task = federation.task
    for rule in method.rules:
        check_declarations(rule)
        if task not in (supported := tasks_with(rule.needs)):
            raise ConfigError(
                f"{rule.name} does not support the task {task!r}, because {why_tasks(rule)}. Supported tasks: "
                f"{', '.join(supported)}."
            )


def check_unweighted(config: Experiment, method: Method) -> None:
    """Validate that no rule makes the correction of probabilities for class weights wrong.

    Args:
        config: Configuration of the run.
        method: Method of the run.

    Raises:
        ConfigError: If the run has class weights, and a rule needs a loss without them.
    """
    rule = next((rule for rule in method.rules if "unweighted" in rule.needs), None)
    if config.class_weights is not None and rule is not None:
        raise ConfigError(
            f"{rule.name} and class_weights cannot be combined: terms of {rule.name} train the classifier without weights or "
            "correct it, too, so that predicted probabilities would be wrong. Remove class_weights."
        )


def check_sums_suffice(method: Method, diagnose: Sequence[str]) -> None:
    """Validate that the method and its diagnostics need only the weighted sum of updates.

    The simulator computes this sum itself; it does not simulate the cryptography that hides individual updates.

    Args:
        method: Method of the run.
        diagnose: Diagnostics of the run.

    Raises:
        MethodConflictError: If a rule reads individual updates.
        ConfigError: If a diagnostic reads individual updates.
    """
    readers = [rule.name for rule in method.halves if "individual" in rule.needs]
    server = server_rule(method)
    if "individual" in server.needs:
        readers.append(server.name)
    if readers:
        raise MethodConflictError(
            f"{readers[0]} reads the update of each individual client, but with secure_aggregation=required the server "
            "sees only their weighted sum. Use a method that needs only sums (see unskew methods), or turn it off."
        )
    codec = next((rule.name for rule in method.client if rule.encodes and rule.stage == "compress"), None)
    if codec is not None:
        raise MethodConflictError(
            f"A sum of updates that {codec} has compressed cannot be decoded, but secure_aggregation=required lets the "
            "server see only sums. Remove one of the two."
        )
    if diagnose:
        raise ConfigError(
            f"diagnose={diagnose[0]} reads individual updates, which secure_aggregation=required forbids. Remove one."
        )


def misspelled_hooks(rule: Rule | ClientSampler) -> list[str]:
    """Return warnings about names in a custom rule or sampler that are similar to hook names, but are never called."""
    kinds = (ClientRule, AggregateRule, ServerRule, SyncRule, DataRule, Rule, ClientSampler)
    kind = next(kind for kind in kinds if isinstance(rule, kind))
    hooks = [name for name in dir(kind) if not name.startswith("_")]
    own = {name for cls in type(rule).__mro__ if not cls.__module__.startswith("unskew.") for name in vars(cls)}
    misspelled = []
    for name in sorted(own - set(hooks) - set(option_defaults(type(rule))) - set(dir(object))):
        near = [] if name.startswith("_") else difflib.get_close_matches(name, hooks, 1, 0.75)
        if near:
            misspelled.append(
                f"{rule.name}: nothing calls or reads {type(rule).__name__}.{name}; did you mean {near[0]!r}?"
            )
    return misspelled


def check_declarations(rule: Rule) -> None:
    """Validate the declarations of a rule, such as its name, weights and needs (raises ``ConfigError``)."""
    name = getattr(rule, "name", None)
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
        raise ConfigError(f"{type(rule).__name__} needs a name of letters, digits, '-', '_' and '.', not {name!r}.")
    if (name in METHODS or name in REFERENCES) and not type(rule).__module__.startswith("unskew."):
        raise ConfigError(f"{type(rule).__name__} has the name {name!r} of a built-in method. Give it another name.")
    if isinstance(rule.needs, str) or not isinstance(rule.needs, Collection):
        raise ConfigError(
            f"{name}: needs must be a tuple of strings, such as needs = ('individual',), not {rule.needs!r}."
        )
    for what in rule.needs:
        if what not in NEEDS:
            raise ConfigError(f"{name}: {unknown_name('need', str(what), NEEDS)}")
    if not callable(rule.weights) and rule.weights not in (None, "samples", "uniform"):
        raise ConfigError(f"{name}: weights must be 'samples', 'uniform', a method or None, not {rule.weights!r}.")
    for kind, hook in ((ServerRule, "step"), (SyncRule, "exchanged_slices"), (AggregateRule, "combine")):
        if isinstance(rule, kind) and getattr(type(rule), hook) is getattr(kind, hook):
            raise ConfigError(f"{name} is a {kind.__name__}, so it must define the method {hook!r}.")
    if isinstance(rule, ServerRule) and rule.steps_without not in (None, "updates", "clients"):
        raise ConfigError(f"{name}: steps_without must be 'updates', 'clients' or None, not {rule.steps_without!r}.")
    size = rule.updates_per_step if isinstance(rule, ServerRule) else None
    if size is not None and (not isinstance(size, int) or size < 1):
        raise ConfigError(
            f"{name}.updates_per_step must be a positive integer number of updates, or None, not {size!r}."
        )
