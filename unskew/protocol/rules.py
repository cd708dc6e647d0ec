"""Base classes of rules, which fill the five slots of a method.

A method fills one or more slots: ``data`` (change client data before training), ``client`` (change local training;
several rules run in sequence), ``sync`` (select the slices of the model that are exchanged in a round), ``aggregate``
(combine the updates of a round into one) and ``server`` (compute the next model from the combined update). Rules are
pure functions of tensors: they take state and return new state, so every engine can run them.

``unskew.protocol.messages`` defines the messages between server and client, ``unskew.protocol.context`` the context of
client rules, and ``unskew.protocol.updates`` the input of the server half.
"""

from unskew.protocol.aggregate_rule import AggregateRule
from unskew.protocol.client_rule import ClientRule, Forward, SurveyTime, changes_updates, most_final_steps, survey_times
from unskew.protocol.context import Context
from unskew.protocol.data_rule import DataRule
from unskew.protocol.federation_info import Weights
from unskew.protocol.messages import EVALUATED, PERSONAL, PERSONAL_BUFFERS, SHIFT, START, Slices, Tensors
from unskew.protocol.method import Method
from unskew.protocol.payload import Stage, UploadContext
from unskew.protocol.report import Report
from unskew.protocol.rule import MetricSpec, Rule, Shape, WithServerHalf
from unskew.protocol.server_rule import ServerRule
from unskew.protocol.sync_rule import SyncRule
from unskew.protocol.updates import Combined, Updates

__all__ = [
    "EVALUATED",
    "PERSONAL",
    "PERSONAL_BUFFERS",
    "SHIFT",
    "START",
    "AggregateRule",
    "ClientRule",
    "Combined",
    "Context",
    "DataRule",
    "Forward",
    "Method",
    "MetricSpec",
    "Report",
    "Rule",
    "ServerRule",
    "Shape",
    "Slices",
    "Stage",
    "SurveyTime",
    "SyncRule",
    "Tensors",
    "Updates",
    "UploadContext",
    "Weights",
    "WithServerHalf",
    "changes_updates",
    "most_final_steps",
    "survey_times",
]
