"""A segmentation over sites: the numbers of the simulation, also from masked sums, and from images of their own."""

import numpy as np
import pytest
import yaml
from support.deployed_runs import compare
from support.masks import UNET, square_folder, squares
from support.sites import LoopPlace, deployed

import unskew
from unskew.deployment.common.data_schema import DataSchema
from unskew.deployment.server.config import Deployment
from unskew.deployment.server.evaluation import EvaluationPlan, evaluate_run
from unskew.deployment.site.process import SiteProcess
from unskew.errors import EngineError


@pytest.fixture
def options(tmp_path):
    x, y = squares(40, np.random.default_rng(0))
    np.savez(tmp_path / "squares.npz", x=x, y=100 * y)
    return {
        **UNET,
        "data": f"npz:{tmp_path}/squares.npz",
        "segmentation": {"classes": "rest,bright,dark", "values": "0,100,200"},
        "max_train_samples": None,
        "partition": "iid",
        "clients": 3,
        "holdout": 0.3,
    }


def evaluated(place):
    rows = evaluate_run(place.folder / "run", EvaluationPlan(("global",)), place, lambda text: None)
    return {(row["client"], row["metric"]): row["value"] for row in rows}


def test_sites_give_the_numbers_of_the_simulation(options, tmp_path):
    result, place = compare(tmp_path, **options, class_weights="balanced", loss="ce+dice:0.5")
    assert {"dice", "dice/bright", "iou/dark", "dice_pooled", "accuracy"} <= set(result.summary)
    found = evaluated(place)
    for client in result.clients:
        for name in ("dice", "loss"):
            assert found[client["client"], name] == pytest.approx(client[name], rel=1e-6)
        assert np.isfinite(found[client["client"], "hd95"])


def test_masked_sums_give_the_dice_of_all_held_out_images(options, tmp_path):
    options = {**options, "secure_aggregation": "required", "rounds": 1}
    _, place = deployed(tmp_path, **options)
    found = evaluated(place)
    model = unskew.load_predictor(tmp_path / "run")
    federation = unskew.load_federation(
        **{name: options[name] for name in ("data", "segmentation", "partition", "clients", "holdout")}
    )
    x, y = (np.concatenate([getattr(c, name).numpy() for c in federation.clients]) for name in ("x_test", "y_test"))
    metrics = federation.objective.metrics_of_outputs(y, model.outputs(x), model.inputs.metrics)
    assert {name for _, name in found} == {*metrics}
    for name, value in metrics.items():
        assert found[None, name] == pytest.approx(value, rel=1e-5), name


def place_of_folders(tmp_path, options, classes=("rest", "bright", "dark")):
    options = {**options, "data": f"masks:{square_folder(tmp_path / 'server', seed=9)}"}
    place = LoopPlace(tmp_path, options)
    for client in range(3):
        folder = tmp_path / "sites" / str(client)
        square_folder(folder / "own", sites=("",), seed=client)
        about = {"name": f"site-{client}", "client": client, "data": {"source": "masks:own"}}
        (folder / "site.yaml").write_text(yaml.safe_dump(about))
        place.sites[client] = SiteProcess(folder / "site.yaml", log=lambda line: None)
    return place, options


def test_sites_train_on_images_of_their_own(options, tmp_path):
    place, options = place_of_folders(tmp_path, options)
    result, _ = deployed(tmp_path, place, Deployment(startup_timeout=0.5, own_data=True), **options)
    assert [row["name"] for row in result.clients] == ["site-0", "site-1", "site-2"]
    assert 0 <= result.summary["dice"] <= 1
    assert {row["samples"] for row in result.clients} == {12}


def test_a_site_with_other_gray_values_is_refused(options, tmp_path):
    place, options = place_of_folders(tmp_path, options)
    from PIL import Image

    mask = tmp_path / "sites" / "1" / "own" / "train" / "masks" / "03.png"
    Image.fromarray(np.full((16, 12), 7, np.uint8)).save(mask)
    with pytest.raises(EngineError, match=r"03\.png has pixels with the gray value 7"):
        deployed(tmp_path, place, Deployment(startup_timeout=0.5, own_data=True), **options)


def test_the_schema_of_a_message_has_classes_and_gray_values(options):
    federation = unskew.load_federation(
        **{name: options[name] for name in ("data", "segmentation", "partition", "clients")}
    )
    schema = DataSchema.of(federation)
    assert DataSchema.read(schema.config()) == schema
    assert schema.objective == federation.objective
