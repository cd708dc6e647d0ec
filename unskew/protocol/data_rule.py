"""Slot ``data``: rules that change the clients' data once before training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unskew.data.federation import ClientData
from unskew.protocol.data_preparation import NOWHERE, ClientPayloads, PreparedData, ServerPayload, Workspace
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.messages import Tensors
from unskew.protocol.rule import Rule


class DataRule(Rule):
    """``data`` slot: changes client data once before training (client payload, server payload, apply)."""

    generates_data: bool = False
    """True if the first step is slow and its output can be reused by other runs."""

    simulated_only: str | None = None
    """Reason why real sites cannot run the rule, as a sentence; None if they can."""

    payload_metrics: Mapping[str, tuple[float, float]] = {}
    """Numbers about the payload of a client for the run summary, with their smallest and largest values.

    Every real site that sends tensors also sends these entries of ``ClientPayloads.summary``, and no others.
    """

    def client_payload(self, prepared: PreparedData, seed: int, workspace: Workspace) -> ClientPayloads | PreparedData:
        """Compute what every client sends to the server, once before training.

        At a real site, only the client ``prepared.client`` has data, and only its payload is sent.

        Args:
            prepared: Federation, server's information about it, and training budget.
            seed: Seed of the run; pass it to ``unskew.seeding`` with your own purpose string.
            workspace: Folder, device, warnings and progress reports of the run.

        Returns:
            Tensors of each client by name, and entries about them for the run summary. In simulations, finished data for
            all clients may be returned instead; then nothing is exchanged.
        """
        return ClientPayloads()

    def summarize_payloads(self, metrics: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        """Return the entries of the run summary about the payloads of real sites.

        Args:
            metrics: Numbers in ``payload_metrics`` of each site that sent tensors, at least one. Sites may be hostile.
        """
        return {}

    def server_payload(self, sent: dict[int, Tensors], federation_info: FederationInfo, seed: int) -> ServerPayload:
        """Compute what the server sends back to the clients.

        Args:
            sent: Tensors that the clients sent, by client and name.
            federation_info: Server's information about the federation.
            seed: Seed of the run.

        Returns:
            Tensors for single clients, and tensors for all clients.
        """
        return ServerPayload()

    def apply_payload(self, client: ClientData, share: Tensors) -> ClientData:
        """Return a client's data after it has received its share.

        Args:
            client: The client's data before.
            share: Tensors that the server sent to this client, by name.
        """
        return client


def apply_data_rule(rule: DataRule, prepared: PreparedData, seed: int, workspace: Workspace = NOWHERE) -> PreparedData:
    """Run the three steps of a data rule for all clients and count their traffic.

    Args:
        rule: The rule.
        prepared: Data and budget of the clients before.
        seed: Seed of the run.
        workspace: Folder, device, warnings and progress reports of the run.

    Returns:
        The data and the budget that training uses.
    """
    payloads = rule.client_payload(prepared, seed, workspace)
    if isinstance(payloads, PreparedData):
        return payloads
    dealt = rule.server_payload(payloads.sent, prepared.federation_info, seed)
    return prepared.received(rule.name, payloads, dealt, rule.apply_payload)
