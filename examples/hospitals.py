"""Six hospitals with tables of their own: a diagnosis, and a measurement a year later.

The patients are those of scikit-learn's breast-cancer and diabetes data. Which hospital they came to, which device measured
them, and which values are missing is made up here: hospitals see other patients, and none of them has all columns whole.

    python examples/hospitals.py --out hospitals --seeds 3
"""

import argparse
import csv
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer, load_diabetes

import unskew
from unskew.comparison.summary_statistics import std_key

HOSPITALS = ("Aspen", "Birch", "Cedar", "Elm", "Fir", "Oak")
DEVICES = ("A1", "B2", "C3")
SETTINGS = {"partition": "natural:hospital", "missing": "indicator", "model": "table-mlp", "batch_size": 16, "lr": 0.05}


def assigned(severity, draws):
    """Hospitals by how severe cases are, with much noise: each sees its own mixture, in its own number."""
    rank = np.argsort(np.argsort(severity + draws.normal(scale=severity.std(), size=len(severity)))) / len(severity)
    return np.searchsorted([0.08, 0.2, 0.35, 0.55, 0.75], rank)


def write(path, columns, hospital, draws):
    """A CSV file with a device for each hospital's years, and values that some hospitals often do not measure."""
    names = list(columns)
    values = [np.array([v if isinstance(v, str) else f"{v:.5g}" for v in c], object) for c in columns.values()]
    for column in range(0, len(names) - 1, 3):  # all but the outcome, which is last
        values[column][draws.random(len(hospital)) < 0.25 * (hospital % 3 == column % 3)] = ""
    device = [DEVICES[(h + int(draws.random() < 0.2)) % 3] for h in hospital]
    rows = zip([HOSPITALS[h] for h in hospital], device, *values, strict=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["hospital", "device", *names], *rows])


def tumours(folder, draws):
    """Ten measurements of cells, and whether the tumour is malignant."""
    data = load_breast_cancer()
    columns = {name.replace(" ", "_"): data.data[:, j] for j, name in enumerate(data.feature_names[:10])}
    columns["malignant"] = np.where(data.target == 0, "yes", "no").astype(object)
    write(folder / "tumours.csv", columns, assigned(columns["mean_radius"], draws), draws)
    return folder / "tumours.csv"


def diabetes(folder, draws):
    """Ten measurements, and how far the disease went in the year after."""
    data = load_diabetes(scaled=False)
    columns = {name: data.data[:, j] for j, name in enumerate(data.feature_names)}
    columns["progression"] = data.target
    write(folder / "diabetes.csv", columns, assigned(columns["bmi"], draws), draws)
    return folder / "diabetes.csv"


def table(title, result, names):
    """Mean and standard deviation over seeds."""
    print(f"\n{title}")
    for row in result.rows():
        rated = [name for name in names if row[name] is not None]  # not every method has personal models
        print(f"  {row['method']:<10}", "   ".join(f"{name} {cell(row[name], row[std_key(name)])}" for name in rated))


def cell(mean, std):
    """A mean, and its standard deviation if there are several seeds."""
    return f"{mean:.3f}" if std is None else f"{mean:.3f} ± {std:.3f}"


def worst(score):
    """The worst hospital, with the global model and with its own."""
    return [f"{whose}_{score}_worst" for whose in ("client", "personal")]


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--out", type=Path, default=Path("hospitals"))
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--rounds", type=int, default=40)
    arguments = options.parse_args()
    arguments.out.mkdir(parents=True)
    draws = np.random.default_rng(0)
    shared = {"seeds": arguments.seeds, "rounds": arguments.rounds, "local_steps": 10, **SETTINGS}

    sick = unskew.compare(
        data=str(tumours(arguments.out, draws)),
        label="malignant",
        categories="device",
        class_weights="balanced",
        metrics="auroc,auprc,f1,balanced_accuracy,ece,recall",
        methods=["fedavg", "scaffold", "ditto"],
        out=arguments.out / "malignant",
        **shared,
    )
    table("Malignant tumours", sick, ["accuracy", "auroc", "auprc", "f1", "ece", "recall/yes", *worst("accuracy")])

    course = unskew.compare(
        data=str(diabetes(arguments.out, draws)),
        task="regression",
        label="progression",
        categories="device,sex",
        loss="huber",
        methods=["fedavg", "scaffold", "ditto"],
        out=arguments.out / "progression",
        **shared,
    )
    table("Progression of diabetes", course, ["r2", "mae", "rmse", *worst("r2")])

    # The model in use: rows as hospitals have them, with another order of columns, gaps and a device that is new.
    new = arguments.out / "new.csv"
    rows = ["2,A1,59,32.1,101,157,93.2,38,4,4.86,87", "1,X9,48,,87,183,,70,3,,69"]
    new.write_text("\n".join(["sex,device,age,bmi,bp,s1,s2,s3,s4,s5,s6", *rows]) + "\n")
    predictor = unskew.load_predictor(arguments.out / "progression" / "fedavg" / "seed-0")
    print("\nTwo new patients:", [round(value) for value in predictor.predict_file(new)])


if __name__ == "__main__":
    main()
