"""Differentially private training of a generator: DP-SGD, with the gradients per sample and the accounting of opacus.

Abadi et al., "Deep Learning with Differential Privacy", 2016, arXiv:1607.00133; opacus: Yousefpour et al. 2021,
arXiv:2109.12298. Each sample is in a step's batch with probability ``q``, independently of the others (Poisson sampling); its
gradient is clipped to the norm ``C``; the sum gets Gaussian noise of deviation ``sigma C`` in every entry::

    g = ( sum_i g_i min(1, C / ||g_i||) + N(0, sigma^2 C^2 I) ) / (q n)

An epoch has ``S = ceil(n / batch)`` steps and ``q = 1/S``. A batch without any sample is a step like the others: it adds its
noise and counts. The unit of the guarantee is one example of a client, added or removed. The numbers of images per class that
the client makes follow its data and are not covered.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from unskew.errors import ConfigError
from unskew.seeding import derive, generator

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
AT_ONCE = 64  # samples whose gradients are held at the same time


@dataclass(frozen=True)
class PrivacyOptions:
    """The guarantee asked for.

    Attributes:
        noise_multiplier: ``sigma``; None finds the one that spends ``epsilon`` in the whole training.
        epsilon: The budget; None for no other limit than the number of epochs. Training stops before it is exceeded.
        delta: Of the guarantee.
        clip: ``C``.
        accountant: ``rdp`` (Renyi) or ``prv`` (tighter, slower).
    """

    noise_multiplier: Positive | None = None
    epsilon: Positive | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    clip: Positive = 1.0
    accountant: Literal["rdp", "prv"] = "rdp"

    def ready(self) -> None:
        """Refuse to begin where opacus is missing."""
        _opacus()

    def sentence(self, epsilon: float, share: str) -> str:
        """The guarantee in words: ``epsilon`` is the most that any client spent; ``share`` says what the client sends.

        Args:
            epsilon: Largest privacy loss of a client.
            share: What a client sends.
        """
        return (
            f"Each client's generator is ({round_up(epsilon):g}, {self.delta:g})-differentially private for one example of "
            f"that client, added or removed (DP-SGD, clip {self.clip:g}, accountant {self.accountant}); {share}"
        )

    def check_delta(self, examples: int, warn: Callable[[str], None]) -> None:
        """Say so where ``delta`` is so large that a generator may give some of its ``examples`` away entirely.

        Args:
            examples: Number of samples of the client.
            warn: Receives the warning.
        """
        if self.delta * examples >= 1:
            warn(
                f"delta={self.delta:g} guarantees little to generators of up to {examples} samples: one that gives each "
                f"sample away with this probability would do. Use delta well below {1 / examples:.2g}."
            )


def round_up(epsilon: float) -> float:
    """To three digits, never below what was spent.

    >>> round_up(9.213), round_up(10.01), round_up(3.0)
    (9.22, 10.1, 3.0)
    """
    shown = float(f"{epsilon:.3g}")
    return shown if shown >= epsilon else float(f"{shown + 10 ** (math.floor(math.log10(epsilon)) - 2):.3g}")


def _opacus() -> Any:
    try:
        import opacus
        import opacus.accountants.utils
        import opacus.validators
    except ImportError as error:
        raise ConfigError("A private generator needs opacus: pip install 'unskew[privacy]'.") from error
    return opacus


@lru_cache(maxsize=4096)
def spent_epsilon(steps: int, sigma: float, q: float, delta: float, accountant: str) -> float:
    """The privacy spent by so many steps with noise ``sigma`` and sampling rate ``q``.

    Args:
        steps: Number of steps.
        sigma: Noise multiplier.
        q: Sampling rate.
        delta: Probability of the guarantee's failure.
        accountant: Name of Opacus's accountant.
    """
    if steps == 0:
        return 0.0
    account = _opacus().accountants.create_accountant(mechanism=accountant)
    account.history = [(sigma, q, steps)]
    with warnings.catch_warnings():
        # That the best order is the largest or smallest known only loosens the bound.
        warnings.simplefilter("ignore")
        return float(account.get_epsilon(delta=delta))


def noise_multiplier(privacy: PrivacyOptions, q: float, steps: int) -> float:
    """The noise multiplier: the one given, or the one that spends ``epsilon`` in ``steps`` steps.

    Args:
        privacy: Privacy options of the generator.
        q: Sampling rate.
        steps: Number of steps.

    Raises:
        ConfigError: No noise multiplier reaches the budget.
    """
    if privacy.noise_multiplier is not None:
        return privacy.noise_multiplier
    if privacy.epsilon is None:
        raise ConfigError("A private generator needs noise_multiplier or epsilon.")
    low, high = 1e-2, 1.0
    while spent_epsilon(steps, high, q, privacy.delta, privacy.accountant) > privacy.epsilon:
        low, high = high, 2 * high
        if high > 1e5:
            # The orders that rdp knows end at 63, so it never gives less than 0.1 (at delta = 1e-5), whatever the noise.
            remedy = "accountant=prv, which has no such limit, or a larger epsilon"
            raise ConfigError(
                f"No noise gives epsilon={privacy.epsilon:g} at delta={privacy.delta:g} by the accountant "
                f"{privacy.accountant}: take {remedy if privacy.accountant == 'rdp' else 'a larger epsilon'}."
            )
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        if spent_epsilon(steps, middle, q, privacy.delta, privacy.accountant) > privacy.epsilon:
            low = middle
        else:
            high = middle
    return high


def replace_batchnorm(module: nn.Module, warn: Callable[[str], None]) -> nn.Module:
    """``module`` with GroupNorm for every BatchNorm, which mixes samples; says so. Call it before making an optimizer.

    Args:
        module: Network to copy.
        warn: Receives the warning.

    Raises:
        ConfigError: Something else in the module has no gradient per sample.
    """
    opacus = _opacus()
    names = [name for name, part in module.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    if names:
        warn(
            f"BatchNorm mixes the samples of a batch, so a private training cannot have it: GroupNorm takes its place in "
            f"{', '.join(names)}."
        )
        fixed: nn.Module = opacus.validators.ModuleValidator.fix(module)
        module = fixed
    check_module(module)
    return module


def check_module(module: nn.Module) -> None:
    """Refuse a module that has no gradient per sample.

    Raises:
        ConfigError: A layer cannot be trained with DP-SGD.
    """
    if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules()):
        raise ConfigError(
            "BatchNorm mixes the samples of a batch, so a private training cannot have it: train what "
            "without_batchnorm makes of the module."
        )
    errors = _opacus().validators.ModuleValidator.validate(module, strict=False)
    if errors:
        raise ConfigError(f"This generator cannot be trained privately: {errors[0]}")


class PrivateTraining:
    """The steps of one private training.

    Args:
        privacy: What is asked for.
        module: In training; without BatchNorm. Its gradients per sample are taken until ``close``.
        optimizer: Of its parameters.
        seed: Of the generator. Whoever knows it knows the noise: on real machines it must be the client's secret.
        examples, epochs, batch: Of the training; ``batch`` is the expected size.

    Raises:
        ConfigError: The module has no gradients per sample, or the budget does not allow one step.

    Attributes:
        module: What a loss must call.
        sigma, q: The noise multiplier and the sampling rate.
        allowed: Steps that the budget allows.
    """

    def __init__(
        self,
        privacy: PrivacyOptions,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        seed: int,
        examples: int,
        epochs: int,
        batch: int,
    ):
        opacus = _opacus()
        check_module(module)
        self.privacy, self.seed, self.examples = privacy, seed, examples
        self.per_epoch = math.ceil(examples / batch)
        self.q = 1 / self.per_epoch
        self.total = epochs * self.per_epoch
        self.sigma = noise_multiplier(privacy, self.q, self.total)
        self.allowed = self._allowed()
        device = next(module.parameters()).device
        self._inner = module
        self._hooks = [
            part.register_forward_pre_hook(_contiguous) for part in module.modules() if isinstance(part, nn.Conv2d)
        ]
        self.module: Any = opacus.GradSampleModule(module, loss_reduction="mean")
        self.optimizer = optimizer
        self.noise = torch.Generator(device)
        self.private = opacus.optimizers.DPOptimizer(
            optimizer,
            noise_multiplier=self.sigma,
            max_grad_norm=privacy.clip,
            expected_batch_size=max(1, round(self.q * examples)),
            generator=self.noise,
        )

    def _allowed(self) -> int:
        budget = self.privacy.epsilon
        if budget is None or self.epsilon(self.total) <= budget:
            return self.total
        low, high = 0, self.total
        while high - low > 1:
            middle = (low + high) // 2
            if self.epsilon(middle) <= budget:
                low = middle
            else:
                high = middle
        if low == 0:
            raise ConfigError(
                f"One step of the private generator already exceeds epsilon={budget:g}: raise noise_multiplier, "
                "lower the batch size, or leave noise_multiplier out, and the noise that fits is found."
            )
        return low

    def epsilon(self, steps: int) -> float:
        """The privacy spent after so many steps."""
        return spent_epsilon(steps, self.sigma, self.q, self.privacy.delta, self.privacy.accountant)

    def batches(self, epoch: int) -> list[Tensor]:
        """The Poisson samples of an epoch's steps, as indices; some may be empty. None are left when the budget is spent."""
        count = max(0, min(self.per_epoch, self.allowed - epoch * self.per_epoch))
        draws = generator(self.seed, "generator epoch", epoch)
        return [
            torch.nonzero(torch.rand(self.examples, generator=draws, dtype=torch.float64) < self.q).flatten()
            for _ in range(count)
        ]

    def step(self, index: Tensor, number: int, loss_of: Callable[[Tensor], Tensor]) -> Tensor:
        """One noisy step on the samples of ``index [B]``, maybe none; returns their mean loss (0 of none).

        Args:
            index: Which samples.
            number: Of the step.
            loss_of: The mean loss of some samples, by calling ``module``.
        """
        params = self.private.params
        self.private.zero_grad()
        total = torch.zeros((), device=index.device)
        for part in torch.split(index, AT_ONCE) if len(index) else ():
            loss = loss_of(part)
            with warnings.catch_warnings():
                # Images need no gradient, which opacus' hooks remark upon.
                warnings.filterwarnings("ignore", "Full backward hook")
                loss.backward()  # type: ignore[no-untyped-call]
            self.private.clip_and_accumulate()
            for p in params:
                p.grad_sample = None
            total += loss.detach() * len(part)
        for p in params:
            if p.summed_grad is None:
                p.summed_grad = torch.zeros_like(p)
        self.noise.manual_seed(derive(self.seed, "generator noise", number))
        self.private.add_noise()
        for p in params:
            assert p.grad is not None
            p.grad /= self.private.expected_batch_size
        self.optimizer.step()
        return total / max(1, len(index))

    def close(self) -> None:
        """Give the module back as it was."""
        self.private.zero_grad()
        self.module.remove_hooks()
        for hook in self._hooks:
            hook.remove()


def _contiguous(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Opacus gives a convolution whose input is strided channels-last no gradients per sample, without a word."""
    return tuple(t.contiguous() for t in inputs)
