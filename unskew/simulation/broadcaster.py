"""Broadcasts of a server: which model, tensors and slices each client receives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unskew.protocol.messages import Broadcast, Slices, Tensors
from unskew.protocol.rules import changes_updates, most_final_steps
from unskew.simulation.client_records import ClientRecords
from unskew.simulation.model_selection import ModelPair
from unskew.simulation.parameter_slices import SliceExchange, complement_slices
from unskew.simulation.server_state import ServerSetup, ServerState
from unskew.simulation.traffic import TrafficMeter


class Broadcaster:
    """Creates the broadcasts of a run, and counts those of its rounds.

    Args:
        setup: Fixed parts of the server.
        state: State of the server.
        clients: Records of the clients.
        traffic: Counts the bytes.

    Attributes:
        exchange: Slices of the model that clients exchange.
        wants_models: Whether clients report their whole models in evaluated rounds if updates do not determine them.
        initial: Initial model ``N/v [d]`` and buffers ``N/b [m]`` of each architecture ``N``, if clients have different ones.
    """

    def __init__(self, setup: ServerSetup, state: ServerState, clients: ClientRecords, traffic: TrafficMeter):
        self.setup = setup
        self.state = state
        self.clients = clients
        self.traffic = traffic
        self.exchange = SliceExchange(setup.method.sync, setup.spec)
        # A mean of whole models would not be protected by a robust rule in the aggregate slot.
        self.wants_models = "mean_model" in setup.needs and setup.method.aggregate is None
        self._initial_buffers = setup.spec.flatten_buffers()
        several = setup.spec.architectures if setup.spec.others else ()
        self.initial: Tensors = {}
        for number, spec in enumerate(several):
            self.initial |= {f"{number}/v": spec.flatten(), f"{number}/b": spec.flatten_buffers()}

    def request_models(self) -> None:
        """Let clients report their whole models, for measurements."""
        self.wants_models = True

    def model_for(self, client: int, model: ModelPair) -> ModelPair:
        """Return a model for a client; if clients have models of different architectures, its initial one instead.

        Args:
            client: Client number.
            model: Parameters and buffers of the model that other clients get.
        """
        if not self.initial:
            return model
        number = client % len(self.setup.spec.architectures)
        return self.initial[f"{number}/v"], self.initial[f"{number}/b"]

    def slices(self, round: int, client: int) -> tuple[Slices | None, Slices | None]:
        """Return the slices that a client downloads and uploads; None for all.

        Args:
            round: Round of the broadcast.
            client: Client number.
        """
        return self.exchange.slices(self.state.rules, round, client, self.clients.last_rounds.get(client))

    def model(self, round: int) -> Tensor:
        """Return the model that clients have after the broadcast of a round, ``[d]``."""
        compressor, state = self.setup.compressor, self.state
        if compressor is None:
            return state.v
        own = state.rules[compressor.name]
        sizes = own["broadcast_bytes"]
        if len(sizes) <= round:
            new, model, size = compressor.compress_broadcast(
                own, state.v, own["broadcast_model"], round, self.setup.seed, self.setup.spec
            )
            # Rounds without a cohort have no broadcast.
            sizes = torch.cat([sizes, sizes.new_zeros(round - len(sizes)), sizes.new_tensor([size])])
            own = {**new, "broadcast_model": model, "broadcast_bytes": sizes}
            state.set_rules({compressor.name: own})
        return own["broadcast_model"]

    def broadcasts(self, round: int, cohort: Sequence[int], evaluated: bool = True) -> list[Broadcast]:
        """Create the broadcasts of a round and count their bytes.

        Args:
            round: Number of the round, from 0.
            cohort: Clients of the round.
            evaluated: Whether the model is evaluated after the round.
        """
        weights = self.setup.federation_info.cohort_weights(cohort)
        pairs = zip(cohort, weights, strict=True)
        return [self.broadcast(round, client, weight, evaluated) for client, weight in pairs]

    def broadcast(self, round: int, client: int, weight: float | None = None, evaluated: bool = True) -> Broadcast:
        """Create the broadcast for ``client`` in ``round`` and count its bytes.

        Args:
            round: Number of the round, from 0.
            client: Client number.
            weight: Client's aggregation weight; None for its weight in a cohort of its own.
            evaluated: Whether the model is evaluated after the round.
        """
        setup = self.setup
        parted = setup.method.sync is not None or changes_updates(setup.method.client)
        model = self.model(round), self.state.b
        report = self.wants_models and parted and evaluated
        broadcast = self._message(round, client, model, *self.slices(round, client), weight, report=report)
        # If only slices are exchanged, a client may start from its own buffers.
        buffers = "sent_statistics" in setup.needs and setup.buffers == "average" and setup.method.sync is None
        if "sent_model" in setup.needs or buffers:
            self.clients.add_sent(broadcast, self.state.version, "sent_model" in setup.needs, buffers)
        self.traffic.count_broadcast(broadcast)
        return broadcast

    def questions(self, round: int, cohort: Sequence[int]) -> list[Broadcast]:
        """Create messages that ask the clients of a round about its model before they train, and count their bytes.

        Args:
            round: Number of the round, from 0.
            cohort: Clients of the round.
        """
        model = self.model(round), self.state.b
        weights = zip(cohort, self.setup.federation_info.cohort_weights(cohort), strict=True)
        self.traffic.count_models(round, [(client, self.slices(round, client)[0]) for client in cohort])
        blank = {"closing": True, "keeps_optimizer": False, "download": {}}
        return [self._message(round, k, model, None, None, weight, **blank) for k, weight in weights]

    def loss_questions(self, round: int, candidates: Sequence[int]) -> list[Broadcast]:
        """Create messages that ask clients for the mean loss of the model of a round, and count their bytes.

        Args:
            round: Number of the round, from 0.
            candidates: Clients to ask.
        """
        model = self.model(round), self.state.b
        downs = [(client, self.slices(round, client)[0]) for client in candidates]
        self.traffic.count_models(round, downs)
        return [self._message(round, client, model, down, (), asks_loss=True) for client, down in downs]

    def final_broadcast(self, round: int, client: int, final: ModelPair) -> Broadcast:
        """Create a broadcast of the final model for fine-tuning; the result is only reported, and no bytes are counted.

        Args:
            round: Number of the round, from 0.
            client: Client number.
            final: Final model and its buffers.
        """
        sync = self.setup.method.sync
        own = () if sync is None else sync.local_slices(self.setup.spec)
        down = complement_slices(own, len(final[0])) if own else None
        fields: dict[str, Any] = {"report": True, "keeps_optimizer": False}
        if most_final_steps(self.setup.method.client) == 0:
            fields["b"] = final[1]  # the client is served without training
        return self._message(round, client, final, down, (), **fields)

    def closing_broadcast(self, round: int, client: int, final: ModelPair) -> Broadcast:
        """Create a broadcast of the final model for the surveys after the last round, and count its bytes.

        Args:
            round: Number of the round, from 0; no other round has it.
            client: Client number.
            final: Final model and its buffers.
        """
        broadcast = self._message(round, client, final, None, (), closing=True, keeps_optimizer=False)
        self.traffic.count_final_model(broadcast)
        return broadcast

    def _message(
        self,
        round: int,
        client: int,
        model: ModelPair,
        down: Slices | None,
        up: Slices | None,
        weight: float | None = None,
        **fields: Any,
    ) -> Broadcast:
        """Create a broadcast without counting it; ``weight`` is by default the client's weight in a cohort of its own."""
        info, (v, b) = self.setup.federation_info, self.model_for(client, model)
        accepted, (state, file) = self.clients.last_rounds.get(client), self.clients.store.state_or_file(client)
        if weight is None:  # after the last round; unseen clients have no weight of their own
            weight = info.cohort_weights([client])[0] if client < info.clients else 1.0
        rules = self.state.rules
        extra = {half.name: half.download(rules[half.name], client) for half in self.setup.method.halves}
        return Broadcast(
            round=round,
            client=client,
            v=v,
            state=state,
            state_files=file,
            weight=weight,
            down=down,
            up=up,
            initial=() if accepted is not None or down is None else complement_slices(down, len(v)),
            accepted=accepted,
            **{
                "b": b if self.setup.buffers == "average" or self.initial else self._initial_buffers,
                "download": {name: tensors for name, tensors in extra.items() if tensors},
                "keeps_optimizer": "optimizer" in self.setup.needs,
                **fields,
            },
        )
