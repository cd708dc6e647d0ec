"""Differentially private training of a generator: DP-SGD with the per-sample gradients and accountants of opacus.

Abadi et al., "Deep Learning with Differential Privacy", 2016, arXiv:1607.00133; opacus: Yousefpour et al. 2021,
arXiv:2109.12298. Each sample is in a step's batch with probability ``q``, independently of the others (Poisson sampling).
Each gradient is clipped to the norm ``C``, and Gaussian noise with standard deviation ``sigma C`` is added to the sum::

    g = ( sum_i g_i min(1, C / ||g_i||) + N(0, sigma^2 C^2 I) ) / (q n)

An epoch has ``S = ceil(n / batch)`` steps and ``q = 1/S``. A step with an empty batch also adds noise and counts. The
guarantee is for one sample of a client, added or removed. It does not cover the number of generated images per class, which
follows the client's data.

Batches and noise are drawn from a secret key. The seed of the other draws, which depend on the position of a sample in its
batch (times of the diffusion, dropout), is secret, too. With ``reproducible``, all are drawn from the seed of the run.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from unskew.errors import ConfigError, explain_missing
from unskew.secret_draws import secret_normal, secret_uniform, seeded_sentence
from unskew.seeding import derive, generator

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
AT_ONCE = 64  # maximum number of per-sample gradients in memory


@dataclass(frozen=True)
class PrivacyOptions:
    """Options of differentially private training.

    Attributes:
        noise_multiplier: Noise multiplier ``sigma``; None: the value with which the whole training spends ``epsilon``.
        epsilon: Privacy budget; training stops before it is exceeded. None: only the number of epochs limits training.
        delta: Probability ``delta`` of the guarantee.
        clip: Maximum gradient norm ``C``.
        accountant: Privacy accountant: ``rdp`` (Renyi) or ``prv`` (tighter, slower).
        reproducible: Compute noise and batches from the seed, so that runs can be repeated, without a guarantee.
    """

    noise_multiplier: Positive | None = None
    epsilon: Positive | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    clip: Positive = 1.0
    accountant: Literal["rdp", "prv"] = "rdp"
    reproducible: bool = False

    def ready(self) -> None:
        """Validate that opacus is installed (raises ``ConfigError`` otherwise)."""
        _opacus()

    def sentence(self, epsilon: float, share: str) -> str:
        """Describe the guarantee in a sentence.

        Args:
            epsilon: Largest privacy loss of any client.
            share: Description of the data that a client sends.
        """
        if self.reproducible:
            return seeded_sentence(round_up(epsilon), self.delta)
        return (
            f"Each client's generator is ({round_up(epsilon):g}, {self.delta:g})-differentially private for one example of "
            f"that client, added or removed (DP-SGD, clip {self.clip:g}, accountant {self.accountant}); {share}"
        )

    def check_delta(self, sizes: Sequence[int], rho: float, warn: Callable[[str], None]) -> None:
        """Warn if ``delta`` is so large that a generator could reveal whole samples, or too small for few samples.

        A generator needs a sample. If none of ``n`` is drawn, one is used nevertheless, which another one might replace if a
        sample is added. The guarantee does not cover this case, of probability ``(1 - rho)^n``.

        Args:
            sizes: Number of samples of each client.
            rho: Probability that a sample is among those of the generator.
            warn: Called with each warning.
        """
        num_samples, fewest = max(1, round(rho * max(sizes))), min(sizes)
        if self.delta * num_samples >= 1:
            warn(
                f"delta={self.delta:g} is too large for generators of up to {num_samples} samples: it would allow revealing "
                f"each sample with this probability. Use delta well below {1 / num_samples:.2g}."
            )
        if (1 - rho) ** fewest >= self.delta:
            warn(
                f"delta={self.delta:g} is too small for clients with {fewest} samples: with probability "
                f"{(1 - rho) ** fewest:.2g}, rho={rho:g} draws none of them, and the guarantee does not hold. Use a larger "
                "rho, or exclude these clients with refuse."
            )


def round_up(epsilon: float) -> float:
    """Round ``epsilon`` to three significant digits, up if necessary, so that the result is not smaller.

    >>> round_up(9.213), round_up(10.01), round_up(3.0)
    (9.22, 10.1, 3.0)
    """
    shown = float(f"{epsilon:.3g}")
    return shown if shown >= epsilon else float(f"{shown + 10 ** (math.floor(math.log10(epsilon)) - 2):.3g}")


def _opacus() -> Any:
    with explain_missing("A private generator needs opacus: pip install 'unskew[privacy]'."):
        import opacus
        import opacus.accountants.utils
        import opacus.validators
    return opacus


@lru_cache(maxsize=4096)
def spent_epsilon(steps: int, sigma: float, q: float, delta: float, accountant: str) -> float:
    """Compute the ``epsilon`` spent by a number of steps.

    Args:
        steps: Number of steps.
        sigma: Noise multiplier.
        q: Sampling rate.
        delta: Probability ``delta`` of the guarantee.
        accountant: Name of the opacus accountant.
    """
    if steps == 0:
        return 0.0
    account = _opacus().accountants.create_accountant(mechanism=accountant)
    account.history = [(sigma, q, steps)]
    with warnings.catch_warnings():
        # Ignore that the best Renyi order is the largest or smallest one; the bound is still valid.
        warnings.simplefilter("ignore")
        return float(account.get_epsilon(delta=delta))


def noise_multiplier(privacy: PrivacyOptions, q: float, steps: int) -> float:
    """Return the configured noise multiplier, or the one with which ``steps`` steps spend ``epsilon``.

    Args:
        privacy: Privacy options of the generator.
        q: Sampling rate.
        steps: Number of steps.

    Raises:
        ConfigError: If no noise multiplier satisfies the budget.
    """
    if privacy.noise_multiplier is not None:
        return privacy.noise_multiplier
    if privacy.epsilon is None:
        raise ConfigError("A private generator needs noise_multiplier or epsilon.")
    low, high = 1e-2, 1.0
    while spent_epsilon(steps, high, q, privacy.delta, privacy.accountant) > privacy.epsilon:
        low, high = high, 2 * high
        if high > 1e5:
            # The largest order of rdp is 63, so its epsilon is never below 0.1 (for delta = 1e-5), for any noise.
            remedy = "accountant=prv, which has no such limit, or a larger epsilon"
            raise ConfigError(
                f"No noise multiplier reaches epsilon={privacy.epsilon:g} for delta={privacy.delta:g} with the accountant "
                f"{privacy.accountant}. Use {remedy if privacy.accountant == 'rdp' else 'a larger epsilon'}."
            )
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        if spent_epsilon(steps, middle, q, privacy.delta, privacy.accountant) > privacy.epsilon:
            low = middle
        else:
            high = middle
    return high


def replace_batchnorm(module: nn.Module, warn: Callable[[str], None]) -> nn.Module:
    """Replace BatchNorm, which mixes samples, by GroupNorm, with a warning. Call this before creating an optimizer.

    Args:
        module: Network to copy.
        warn: Called with the warning.

    Raises:
        ConfigError: If another layer does not support per-sample gradients.
    """
    opacus = _opacus()
    names = [name for name, part in module.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    if names:
        warn(
            f"BatchNorm mixes the samples of a batch, so private training does not support it. GroupNorm replaces it in "
            f"{', '.join(names)}."
        )
        fixed: nn.Module = opacus.validators.ModuleValidator.fix(module)
        module = fixed
    check_module(module)
    return module


def check_module(module: nn.Module) -> None:
    """Validate that a module supports per-sample gradients (raises ``ConfigError`` otherwise)."""
    if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules()):
        raise ConfigError(
            "BatchNorm mixes the samples of a batch, so private training does not support it. Convert the module with "
            "replace_batchnorm first."
        )
    errors = _opacus().validators.ModuleValidator.validate(module, strict=False)
    if errors:
        raise ConfigError(f"This generator cannot be trained privately: {errors[0]}")


class PrivateTraining:
    """Differentially private training of one generator.

    The loss must call ``module`` of this object. ``sigma`` is the noise multiplier, ``q`` the sampling rate, and
    ``allowed`` the number of steps that the budget allows.

    Args:
        privacy: Privacy options.
        module: Network without BatchNorm. It computes per-sample gradients until ``close``.
        optimizer: Optimizer of its parameters.
        seed: Random seed of the generator.
        secret: Secret key of batches and noise, int64 ``[2]``; None draws them from the seed, without a guarantee.
        num_samples: Number of samples.
        epochs: Number of epochs.
        batch: Expected batch size.

    Raises:
        ConfigError: If the module does not support per-sample gradients, or the budget does not allow one step.
    """

    def __init__(
        self,
        privacy: PrivacyOptions,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        seed: int,
        secret: Tensor | None,
        num_samples: int,
        epochs: int,
        batch: int,
    ):
        opacus = _opacus()
        check_module(module)
        self.privacy = privacy
        self.seed, self.secret = seed, secret
        self.num_samples = num_samples
        self.per_epoch = math.ceil(num_samples / batch)
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
            expected_batch_size=max(1, round(self.q * num_samples)),
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
                f"One step of the private generator already exceeds epsilon={budget:g}. Increase noise_multiplier, "
                "reduce the batch size, or remove noise_multiplier to determine it from epsilon."
            )
        return low

    def epsilon(self, steps: int) -> float:
        """Return the ``epsilon`` spent after ``steps`` steps."""
        return spent_epsilon(steps, self.sigma, self.q, self.privacy.delta, self.privacy.accountant)

    def batches(self, epoch: int) -> list[Tensor]:
        """Draw the batches of an epoch as indices by Poisson sampling; an empty list if the budget is spent."""
        count = max(0, min(self.per_epoch, self.allowed - epoch * self.per_epoch))
        if self.secret is None:
            draws = generator(self.seed, "generator epoch", epoch)
            uniform = [torch.rand(self.num_samples, generator=draws, dtype=torch.float64) for _ in range(count)]
        else:
            first = epoch * self.per_epoch
            uniform = [secret_uniform(self.secret, 2 * (first + k), self.num_samples) for k in range(count)]
        return [torch.nonzero(numbers < self.q).flatten() for numbers in uniform]

    def step(self, index: Tensor, number: int, loss_of: Callable[[Tensor], Tensor]) -> Tensor:
        """Take a private step on a batch; returns the mean loss, or 0 for an empty batch.

        Args:
            index: Indices of the samples, ``[B]``; may be empty.
            number: Index of the step.
            loss_of: Computes the mean loss of samples by calling ``module``.
        """
        params = self.private.params
        self.private.zero_grad()
        total = torch.zeros((), device=index.device)
        for part in torch.split(index, AT_ONCE) if len(index) else ():
            loss = loss_of(part)
            with warnings.catch_warnings():
                # Opacus' hooks warn because images do not require gradients.
                warnings.filterwarnings("ignore", "Full backward hook")
                loss.backward()  # type: ignore[no-untyped-call]
            self.private.clip_and_accumulate()
            for p in params:
                p.grad_sample = None
            total += loss.detach() * len(part)
        for p in params:
            if p.summed_grad is None:
                p.summed_grad = torch.zeros_like(p)
        self._add_noise(number)
        for p in params:
            assert p.grad is not None
            p.grad /= self.private.expected_batch_size
        self.optimizer.step()
        return total / max(1, len(index))

    def _add_noise(self, number: int) -> None:
        """Set the gradient to the sum of the clipped gradients with noise."""
        params = self.private.params
        if self.secret is None:
            self.noise.manual_seed(derive(self.seed, "generator noise", number))
            self.private.add_noise()
            return
        sizes = [p.numel() for p in params]
        noise = secret_normal(self.secret.to(params[0].device), 2 * number + 1, sum(sizes)) * self.sigma
        for p, own in zip(params, torch.split(noise * self.privacy.clip, sizes), strict=True):
            p.grad = (p.summed_grad.to(torch.float64) + own.view_as(p)).to(p.dtype)

    def close(self) -> None:
        """Remove the hooks from the module."""
        self.private.zero_grad()
        self.module.remove_hooks()
        for hook in self._hooks:
            hook.remove()


def _contiguous(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Make inputs of a convolution contiguous: opacus silently computes no per-sample gradients for channels-last ones."""
    return tuple(t.contiguous() for t in inputs)
