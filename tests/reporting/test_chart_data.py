"""Data of charts, by hand."""

from dataclasses import replace

from support.run_groups import group

from unskew.reporting.chart_data import client_boxes, mean_line


def row(round, loss):
    return {"round": round, "loss": loss, "bytes_up": 1e6 * round, "bytes_down": 0, "seconds": 1.0}


def test_a_curve_averages_the_same_rounds_of_all_seeds():
    (runs,) = group({"a": [0.5, 0.5]}).series
    histories = [[row(1, 1.0), row(2, 2.0), row(3, 3.0)], [row(1, None), row(2, 5.0), row(3, 6.0), row(4, 7.0)]]
    runs.runs = [replace(run, history=own) for run, own in zip(runs.runs, histories, strict=True)]
    line = mean_line(runs, "loss")
    assert (line["round"], line["mean"], line["mb"]) == ([2, 3], [3.5, 4.5], [2, 3])


def test_boxes_are_without_attackers_and_unseen_clients():
    clients = [{"client": k, "samples": 9, "num_held_out": 50, "accuracy": k / 10} for k in range(5)]
    clients[0]["attacker"] = clients[4]["unseen"] = True
    box = client_boxes(group({"a": [0.5]}, clients=clients))["accuracy"]["a"]
    assert (box["dots"], box["median"]) == ([10, 20, 30], 20)
