"""Public data sets with real clients are prepared from folders in the layouts in which users have them."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.running import call

import unskew

ROOT = Path(__file__).parents[2]
pytest.importorskip("pyarrow")


@pytest.fixture
def prepare(monkeypatch):
    """The script, called with arguments."""
    monkeypatch.syspath_prepend(str(ROOT))
    from examples.federations import main

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["federations.py", *map(str, arguments)])
        main()

    return run


def picture(path, shape=(12, 16, 3), seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)).save(path)


def write(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def classes_by_client(federation):
    return dict(zip(federation.client_names, federation.class_counts().tolist(), strict=True))


def test_flair_becomes_a_multi_label_table_by_user(prepare, tmp_path):
    parts = ["train"] * 6 + ["val"] * 2 + ["test"] * 4
    entries = []
    for number, part in enumerate(parts):
        picture(tmp_path / "small_images" / f"{number}.jpg", (16, 16, 3), number)
        labels = [["plant"], ["plant", "structure"]][number % 2]
        entries.append(
            {
                "user_id": f"{part}{number % 2}@N00",
                "image_id": str(number),
                "labels": labels,
                "fine_grained_labels": labels,
                "partition": part,
            }
        )
    (tmp_path / "labels_and_metadata.json").write_text(json.dumps(entries))
    prepare("flair", tmp_path)
    federation = unskew.load_federation(
        f"table:{tmp_path}",
        label="labels",
        image="image",
        image_size=8,
        partition="natural:user_id",
        clients=None,
        holdout=0,
    )
    assert federation.client_names == ("train0@N00", "train1@N00", "val0@N00", "val1@N00")
    assert federation.objective.name == "multilabel"
    assert len(federation.test[1]) == 4
    assert classes_by_client(federation)["train1@N00"] == [3, 3]


def test_the_breast_cancer_studies_have_relapse_or_death_as_their_event(prepare, tmp_path):
    shared = "pid,age,meno,size,grade,nodes,pgr,er,hormon"
    write(
        tmp_path / "rotterdam.csv",
        f"rownames,{shared},chemo,rtime,recur,dtime,death",
        "1,1,60,1,<=20,3,0,5,6,0,0,100,1,300,1",  # relapse, then death
        "2,2,61,1,<=20,2,1,5,6,0,0,400,0,500,1",  # death without relapse
        "3,3,62,0,<=20,2,1,5,6,1,0,600,0,700,0",  # neither
    )
    write(tmp_path / "gbsg.csv", f"rownames,{shared},rfstime,status", "1,9,49,0,18,2,2,0,0,0,1838,0")
    prepare("breast-cancer", tmp_path / "rotterdam.csv", tmp_path / "gbsg.csv", "--out", tmp_path / "both.csv")
    assert (tmp_path / "both.csv").read_text().split() == [
        "study,age,meno,grade,nodes,pgr,er,hormon,days,event",
        "Rotterdam,60,1,3,0,5,6,0,100,1",
        "Rotterdam,61,1,2,1,5,6,0,500,1",
        "Rotterdam,62,0,2,1,5,6,1,700,0",
        "GBSG,49,0,2,2,0,0,0,1838,0",
    ]


def test_heart_disease_of_flamby_keeps_missing_values(prepare, tmp_path):
    for name in ("cleveland", "hungarian", "switzerland", "va"):
        write(
            tmp_path / f"processed.{name}.data",
            *(f"{40 + n}.0,1.0,4.0,140,260,0,0,112,1,3.0,2,?,?,{n % 3}" for n in range(12)),
        )
    prepare("flamby", tmp_path, "heart_disease", tmp_path, "--out", tmp_path / "heart.csv")
    federation = unskew.load_federation(
        f"table:{tmp_path / 'heart.csv'}",
        label="disease",
        exclude="vessels,thal",
        partition="natural:hospital",
        clients=None,
    )
    assert federation.client_names == ("Budapest", "Cleveland", "Long Beach", "Zurich and Basel")
    assert (tmp_path / "heart.csv").read_text().splitlines()[1] == "Cleveland,40,1,4,140,260,0,0,112,1,3,2,,,no"


def test_tcga_brca_of_flamby_keeps_the_split_and_the_regions(prepare, tmp_path):
    package = tmp_path / "flamby" / "datasets" / "fed_tcga_brca"
    write(package / "brca.csv", "pid,age,E,T", "P0,50,1.0,30.0", "P1,60,0.0,40.0", "P2,70,1.0,9.0", "P3,33,1.0,1.0")
    write(
        package / "dataset_creation_scripts" / "train_test_split.csv",
        *("pid,fold,fold2", "P1,train,train_0", "P0,train,train_5", "P2,test,test_3"),
    )
    prepare("flamby", tmp_path, "tcga_brca", package, "--out", tmp_path / "out")
    assert (tmp_path / "out" / "train.csv").read_text().split() == [
        "region,days,event,age",
        "Canada,30.0,1,50",
        "Northeast,40.0,0,60",
    ]
    assert (tmp_path / "out" / "test.csv").read_text().split()[1:] == ["Midwest,9.0,1,70"]


def test_isic_of_flamby_is_a_table_of_its_preprocessed_images(prepare, tmp_path):
    package = tmp_path / "flamby" / "datasets" / "fed_isic2019"
    lines = ["image,MEL,NV,BCC,AK,BKL,DF,VASC,SCC,UNK,target,center,fold,fold2"]
    for n in range(12):
        part = "test" if n > 8 else "train"
        lines.append(f"ISIC_{n},0,0,0,0,0,0,0,0,0,{n % 2},{n % 3},{part},{part}_{n % 3}")
        height = 10 + n  # preprocessed images have one short side and different long sides
        picture(tmp_path / "isic" / "ISIC_2019_Training_Input_preprocessed" / f"ISIC_{n}.jpg", (height, 10, 3), n)
    write(package / "dataset_creation_scripts" / "train_test_split", *lines)
    prepare("flamby", tmp_path, "isic2019", tmp_path / "isic", "--out", tmp_path / "table")
    federation = unskew.load_federation(
        f"table:{tmp_path / 'table'}",
        label="lesion",
        image="image",
        image_size=8,
        partition="natural:center",
        clients=None,
        holdout=0,
    )
    assert classes_by_client(federation) == {"BCN": [2, 1], "HAM_vidir_modern": [2, 1], "HAM_vidir_molemax": [1, 2]}
    assert federation.shape == (3, 8, 8)


def test_slides_of_camelyon16_are_the_means_of_their_tiles(prepare, tmp_path):
    package = tmp_path / "flamby" / "datasets" / "fed_camelyon16"
    lines, draws, tiles = ["label,hospital_corrected,slide_name"], np.random.default_rng(0), {}
    names = [f"{kind}_{n:03}" for kind in ("normal", "tumor") for n in range(6)] + ["test_001", "test_002"]
    for number, name in enumerate(names):
        label = int(name.startswith("tumor") or name == "test_001")
        lines.append(f"{label},{number % 2}.0,{name}.tif")
        tiles[name] = draws.normal(size=(3 + number, 8)).astype(np.float32)
        np.save(tmp_path / f"{name.capitalize()}.tif.npy", tiles[name])
    write(package / "metadata" / "metadata.csv", *lines)
    prepare("flamby", tmp_path, "camelyon16", tmp_path, "--out", tmp_path / "slides.npz")
    source = unskew.load_federation(
        f"npz:{tmp_path / 'slides.npz'}", partition="natural:hospital", clients=None, holdout=0
    )
    assert source.client_names == ("RUMC", "UMCU")
    assert source.class_counts().sum(0).tolist() == [6, 6]
    x, y = source.test
    assert y.tolist() == [1, 0]
    np.testing.assert_allclose(x[0].numpy(), tiles["test_001"].astype(np.float64).mean(0), rtol=1e-6)


def sites_of(folder):
    """Numbers of images and of masks by site and part."""
    counts = {}
    for path in sorted(folder.rglob("*.png")):
        counts.setdefault("/".join(path.relative_to(folder).parts[:2]), []).append(path.parts[-2])
    return {key: (kinds.count("images"), kinds.count("masks")) for key, kinds in counts.items()}


def test_nuclei_are_sorted_by_acquisition_and_their_masks_are_merged(prepare, tmp_path):
    sizes = [(256, 256)] * 6 + [(320, 256)] * 5 + [(1024, 1024)]
    for number, (width, height) in enumerate(sizes):
        folder = tmp_path / "clone" / "stage1_train" / f"{number:064}"
        picture(folder / "images" / f"{folder.name}.png", (height, width, 4), number)
        for left in (0, 2):
            mask = np.zeros((height, width), np.uint8)
            mask[:, left * width // 4 : (left + 1) * width // 4] = 255
            (folder / "masks").mkdir(exist_ok=True)
            Image.fromarray(mask).save(folder / "masks" / f"{left}.png")
    prepare("nuclei", tmp_path / "clone", "--out", tmp_path / "nuclei", "--size", 16)
    assert sites_of(tmp_path / "nuclei") == {"A/train": (5, 5), "A/test": (1, 1), "B/train": (4, 4), "B/test": (1, 1)}
    merged = np.asarray(Image.open(next((tmp_path / "nuclei" / "B" / "test" / "masks").iterdir())))
    assert merged[0].tolist() == [255] * 4 + [0] * 4 + [255] * 4 + [0] * 4


def save_volume(path, values):
    nibabel = pytest.importorskip("nibabel")
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), path)


def scans(name, root):
    """Two scans in FLamby's layout of a data set, with an object in 8 of 12 slices; return the expected sites."""
    package = root / "flamby" / "datasets" / f"fed_{name}" / "metadata"
    if name == "ixi":
        write(package / "metadata_tiny.csv", "Patient ID,Manufacturer,Split", "2,0,train", "12,1,test")
        subjects = [root / "data" / "7kd5wj7v7p-3" / "IXI_sample" / n for n in ("IXI002-Guys-0828", "IXI012-HH-1211")]
        paths = [(s / "T1" / f"{s.name}_image.nii.gz", s / "label" / f"{s.name}_label.nii.gz") for s in subjects]
        sites = {"Guys/train": (2, 2), "HH/test": (2, 2)}
    elif name == "kits19":
        write(
            package / "thresholded_sites.csv",
            *("case_ids,site_ids,train_test_split,train_test_split_silo", "case_00021,0,train,train_0"),
            "case_00038,5,test,test_5",
        )
        cases = [root / "data" / "data" / n for n in ("case_00021", "case_00038")]
        paths = [(c / "imaging.nii.gz", c / "segmentation.nii.gz") for c in cases]
        sites = {"site-0/train": (2, 2), "site-5/test": (2, 2)}
    else:
        write(
            package / "metadata.csv", "SeriesInstanceUID,Manufacturer,Split", "1.2,0,train", "1.3,3,test", "1.4,1,test"
        )
        cases = [root / "data" / n for n in ("1.2", "1.3")]  # the third one was not downloaded
        paths = [(c / "patient.nii.gz", c / "mask_consensus.nii.gz") for c in cases]
        sites = {"GE/train": (2, 2), "Toshiba/test": (2, 2)}
    axis = 0 if name == "kits19" else 2
    for number, (image, mask) in enumerate(paths):
        values = np.random.default_rng(number).normal(0, 300, (12, 10, 10)).astype(np.float32)
        classes = np.zeros((12, 10, 10), np.uint8)
        classes[2:10, :5] = 1 + (name == "kits19")
        save_volume(image, np.moveaxis(values, 0, axis))
        save_volume(mask, np.moveaxis(classes, 0, axis))
    return sites


@pytest.mark.parametrize("name", ["ixi", "kits19", "lidc_idri"])
def test_volumes_of_flamby_become_slices_with_objects(name, prepare, tmp_path):
    sites = scans(name, tmp_path)
    prepare("flamby", tmp_path, name, tmp_path / "data", "--out", tmp_path / "slices", "--size", 10)
    assert sites_of(tmp_path / "slices") == sites
    mask = np.asarray(Image.open(next((tmp_path / "slices").rglob("masks/*.png"))))
    assert np.unique(mask[:5]).tolist() == [1 + (name == "kits19")]
    assert not mask[5:].any()


def test_the_command_of_the_page_runs_on_a_prepared_table(prepare, tmp_path, capsys):
    rows = [f"{40 + n},{n % 2},1,1,1,1,{n % 2},{100 + n},{n % 2},{200 + n},{n % 2}" for n in range(30)]
    write(
        tmp_path / "rotterdam.csv",
        "age,meno,grade,nodes,pgr,er,hormon,rtime,recur,dtime,death",
        *rows,
    )
    write(
        tmp_path / "gbsg.csv",
        "age,meno,grade,nodes,pgr,er,hormon,rfstime,status",
        *(f"{50 + n},{n % 2},2,2,{n},3,0,{300 + n},{n % 2}" for n in range(20)),
    )
    prepare("breast-cancer", tmp_path / "rotterdam.csv", tmp_path / "gbsg.csv", "--out", tmp_path / "both.csv")
    command = ["partition", f"table:{tmp_path / 'both.csv'}", "--label", "event", "--exclude", "days"]
    assert "GBSG" in call(capsys, *command, "--partition", "natural:study").out
