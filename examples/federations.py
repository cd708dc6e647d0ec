"""Prepare public data sets with real clients for unskew, from the files as their projects distribute them.

    python examples/federations.py flair dataset_dir
    python examples/federations.py breast-cancer rotterdam.csv gbsg.csv --out breast-cancer.csv
    python examples/federations.py nuclei kaggle-dsbowl-2018-dataset-fixes --out nuclei --size 128
    python examples/federations.py flamby FLamby heart_disease heart_disease_dataset --out heart.csv
    python examples/federations.py flamby FLamby kits19 kits19 --out kits19 --size 128

``FLamby`` is a clone of owkin/FLamby, which has the centers and the splits; the path after the name is the folder that
its download script filled. Volumes need ``pip install nibabel``. Nothing is downloaded.
"""

import argparse
import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

Row = dict[str, object]
HEART = {
    "cleveland": "Cleveland",
    "hungarian": "Budapest",
    "switzerland": "Zurich and Basel",
    "va": "Long Beach",
}
HEART_COLUMNS = (
    "age", "sex", "chest_pain", "resting_pressure", "cholesterol", "fasting_sugar", "resting_ecg", "max_heart_rate",
    "exercise_angina", "st_depression", "st_slope", "vessels", "thal", "disease",
)  # fmt: skip
REGIONS = ("Northeast", "South", "West", "Midwest", "Europe", "Canada")
LESIONS = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
LESION_CENTERS = ("BCN", "HAM_vidir_molemax", "HAM_vidir_modern", "HAM_rosendahl", "MSK", "HAM_vienna_dias")
SLIDE_CENTERS = ("RUMC", "UMCU")
SCANNERS = ("GE", "Philips", "Siemens", "Toshiba")
NUCLEI = {(256, 256): "A", (320, 256): "B", (360, 360): "C", (696, 520): "D"}
"""Acquisitions of the nuclei by the size of their images; 39 images of other sizes are left out."""


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write rows to a CSV file, with the columns of the first row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_split(folder: Path, rows: list[Row], parts: list[str]) -> None:
    """Write ``train.csv`` and ``test.csv``."""
    for part in ("train", "test"):
        write_rows(folder / f"{part}.csv", [row for row, own in zip(rows, parts, strict=True) if own == part])


# Tables and images


def flair(folder: Path) -> None:
    """Write ``train.jsonl`` and ``test.jsonl`` next to FLAIR's ``labels_and_metadata.json``; ``val`` joins training."""
    entries = json.loads((folder / "labels_and_metadata.json").read_text(encoding="utf-8"))
    for part, partitions in (("train", ("train", "val", "dev")), ("test", ("test",))):
        with (folder / f"{part}.jsonl").open("w", encoding="utf-8") as file:
            for entry in entries:
                if entry["partition"] in partitions:
                    row = {"image": f"small_images/{entry['image_id']}.jpg", "user_id": entry["user_id"]}
                    row |= {name: entry[name] for name in ("labels", "fine_grained_labels")}
                    file.write(json.dumps(row) + "\n")


def breast_cancer(rotterdam: Path, gbsg: Path, out: Path) -> None:
    """Join the studies of R's ``survival``; the event is relapse or death, as Royston and Altman 2013 define it."""
    shared = ("age", "meno", "grade", "nodes", "pgr", "er", "hormon")
    rows: list[Row] = []
    for row in read_rows(rotterdam):
        relapse = row["recur"] == "1"
        time = row["rtime"] if relapse else row["dtime"]
        event = int(relapse or row["death"] == "1")
        rows.append({"study": "Rotterdam", **{name: row[name] for name in shared}, "days": time, "event": event})
    for row in read_rows(gbsg):
        values = {name: row[name] for name in shared}
        rows.append({"study": "GBSG", **values, "days": row["rfstime"], "event": row["status"]})
    write_rows(out, rows)


def nuclei(clone: Path, out: Path, size: int) -> None:
    """Merge the masks of the nuclei of each image, and sort the images by acquisition; every fifth one is for testing."""
    count = dict.fromkeys(NUCLEI.values(), 0)
    for folder in sorted((clone / "stage1_train").iterdir()):
        image = Image.open(folder / "images" / f"{folder.name}.png").convert("RGB")
        site = NUCLEI.get(image.size)
        if site is None:
            continue
        mask = np.zeros(image.size[::-1], bool)
        for path in sorted((folder / "masks").glob("*.png")):
            mask |= np.asarray(Image.open(path).convert("L")) > 0
        part = "test" if count[site] % 5 == 4 else "train"
        count[site] += 1
        save_pair(out / site / part, folder.name, np.asarray(image), mask * np.uint8(255), size)


def save_pair(folder: Path, name: str, image: np.ndarray, mask: np.ndarray, size: int) -> None:
    """Write an image and its mask in the layout of ``masks:``, resized to squares."""
    for kind, values, how in (("images", image, Image.Resampling.BILINEAR), ("masks", mask, Image.Resampling.NEAREST)):
        path = folder / kind / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(values).resize((size, size), how).save(path)


# FLamby


class Folders(NamedTuple):
    """Folder of a data set in FLamby's package, the folder of its data, and the file or folder to write."""

    package: Path
    data: Path
    out: Path


def heart_disease(folders: Folders) -> None:
    """Join the four files of the UCI set; missing values stay missing."""
    rows: list[Row] = []
    for name, hospital in HEART.items():
        for line in (folders.data / f"processed.{name}.data").read_text(encoding="utf-8").splitlines():
            values = dict(zip(HEART_COLUMNS, line.split(","), strict=True))
            row = {key: "" if value == "?" else f"{float(value):g}" for key, value in values.items()}
            rows.append({"hospital": hospital, **row, "disease": "no" if row["disease"] == "0" else "yes"})
    write_rows(folders.out, rows)


def tcga_brca(folders: Folders) -> None:
    """Write the patients of FLamby's split with their regions."""
    center = {row["pid"]: row for row in read_rows(folders.package / "dataset_creation_scripts/train_test_split.csv")}
    rows, parts = [], []
    for row in read_rows(folders.data / "brca.csv"):
        split = center.get(row.pop("pid"))
        if split is not None:
            region = REGIONS[int(split["fold2"].rpartition("_")[2])]
            rows.append({"region": region, "days": row.pop("T"), "event": int(float(row.pop("E"))), **row})
            parts.append(split["fold"])
    write_split(folders.out, rows, parts)


def isic2019(folders: Folders) -> None:
    """Write tables with the names of the preprocessed images."""
    images = (folders.data / "ISIC_2019_Training_Input_preprocessed").resolve()
    split = read_rows(folders.package / "dataset_creation_scripts/train_test_split")
    rows: list[Row] = [
        {
            "image": str(images / f"{row['image']}.jpg"),
            "lesion": LESIONS[int(row["target"])],
            "center": LESION_CENTERS[int(row["center"])],
        }
        for row in split
    ]
    write_split(folders.out, rows, [row["fold"] for row in split])


def camelyon16(folders: Folders) -> None:
    """Write the mean features of the tiles of each slide; FLamby's model weights the tiles instead."""
    about = {row["slide_name"].split(".")[0]: row for row in read_rows(folders.package / "metadata/metadata.csv")}
    arrays: dict[str, list[object]] = {name: [] for name in ("x", "y", "hospital", "x_test", "y_test")}
    for path in sorted(folders.data.glob("*.npy")):
        slide = path.name.split(".")[0].lower()
        end = "_test" if slide.startswith("test") else ""
        arrays[f"x{end}"].append(np.load(path).mean(0, dtype=np.float64).astype(np.float32))
        arrays[f"y{end}"].append("tumor" if about[slide]["label"] == "1" else "normal")
        if not end:
            arrays["hospital"].append(SLIDE_CENTERS[int(float(about[slide]["hospital_corrected"]))])
    np.savez(folders.out, **{name: np.array(values) for name, values in arrays.items() if values})


class Volume(NamedTuple):
    """Volume with its mask, where it belongs, the axis of its slices, and the range of values from black to white."""

    name: str
    site: str
    part: str
    image: Path
    mask: Path
    axis: int
    range: tuple[float, float] | None


def ixi(folders: Folders) -> Iterator[Volume]:
    """Find brains of IXI Tiny; the range of values is that of each volume."""
    part = {int(row["Patient ID"]): row["Split"] for row in read_rows(folders.package / "metadata/metadata_tiny.csv")}
    for image in sorted(folders.data.rglob("T1/*.nii.gz")):
        subject = image.parents[1]
        number, site = subject.name.split("-")[:2]
        mask = next((subject / "label").glob("*.nii.gz"))
        yield Volume(subject.name, site, part[int(number.removeprefix("IXI"))], image, mask, 2, None)


def kits19(folders: Folders) -> Iterator[Volume]:
    """Find kidneys (1) and their tumors (2) in the clone of KiTS19, for the six sites of FLamby."""
    for row in read_rows(folders.package / "metadata/thresholded_sites.csv"):
        case = folders.data / "data" / row["case_ids"]
        names = case / "imaging.nii.gz", case / "segmentation.nii.gz"
        yield Volume(case.name, f"site-{row['site_ids']}", row["train_test_split"], *names, 0, (-200.0, 300.0))


def lidc_idri(folders: Folders) -> Iterator[Volume]:
    """Find nodules of the lung by the maker of the scanner."""
    for row in read_rows(folders.package / "metadata/metadata.csv"):
        scan = folders.data / row["SeriesInstanceUID"]
        if scan.is_dir():
            names = scan / "patient.nii.gz", scan / "mask_consensus.nii.gz"
            site = SCANNERS[int(row["Manufacturer"])]
            yield Volume(scan.name, site, row["Split"], *names, 2, (-1000.0, 400.0))


def write_slices(volumes: Iterator[Volume], out: Path, size: int, every: int = 4) -> None:
    """Write every fourth slice with an object, because unskew has no patches of volumes."""
    import nibabel

    for volume in volumes:
        image, mask = nibabel.load(volume.image), nibabel.load(volume.mask)
        values, labels = (np.moveaxis(np.asanyarray(file.dataobj), volume.axis, 0) for file in (image, mask))
        low, high = volume.range or np.percentile(values, (1, 99))
        gray = (np.clip((values.astype(np.float64) - low) / (high - low), 0, 1) * 255).astype(np.uint8)
        classes = np.round(labels).astype(np.uint8)
        for number in np.flatnonzero(classes.any((1, 2)))[::every]:
            name = f"{volume.name}_{number:03}"
            save_pair(out / volume.site / volume.part, name, gray[number], classes[number], size)


VOLUMES: dict[str, Callable[[Folders], Iterator[Volume]]] = {"ixi": ixi, "kits19": kits19, "lidc_idri": lidc_idri}
OTHERS: dict[str, Callable[[Folders], None]] = {
    "heart_disease": heart_disease,
    "tcga_brca": tcga_brca,
    "isic2019": isic2019,
    "camelyon16": camelyon16,
}


def flamby(clone: Path, name: str, data: Path, out: Path, size: int) -> None:
    """Prepare a data set of FLamby."""
    folders = Folders(clone / "flamby" / "datasets" / f"fed_{name}", data, out)
    if name in VOLUMES:
        write_slices(VOLUMES[name](folders), out, size)
    else:
        OTHERS[name](folders)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("flair").add_argument("folder", type=Path)
    both = commands.add_parser("breast-cancer")
    both.add_argument("rotterdam", type=Path)
    both.add_argument("gbsg", type=Path)
    cells = commands.add_parser("nuclei")
    cells.add_argument("clone", type=Path)
    seven = commands.add_parser("flamby")
    seven.add_argument("clone", type=Path)
    seven.add_argument("name", choices=[*OTHERS, *VOLUMES])
    seven.add_argument("data", type=Path)
    for command in (both, cells, seven):
        command.add_argument("--out", type=Path, required=True)
    for command in (cells, seven):
        command.add_argument("--size", type=int, default=128)
    options = vars(parser.parse_args())
    prepare = {"flair": flair, "breast-cancer": breast_cancer, "nuclei": nuclei, "flamby": flamby}
    try:
        prepare[options.pop("command")](**options)
    except (OSError, KeyError, ValueError) as error:
        parser.error(f"{error}. Pass the folders and files as their project distributes them; see --help.")


if __name__ == "__main__":
    main()
