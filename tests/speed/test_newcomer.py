"""The path of somebody new without its installation: checks of each step, and the commands on the generated table."""

import csv
import sys
import types

import pytest
from support.pages import ROOT
from support.running import call

from speed import newcomer
from speed.newcomer import StepError, Walk

README_COMMANDS = ["make demo", "make test"]


class Recorder(Walk):
    """Records the steps, and runs commands of unskew and the code of the tutorial by ``run``, if it is given."""

    def __init__(self, run=None):
        super().__init__({}, show=lambda line: None)
        self.titles, self.run = [], run

    def step(self, title, command, folder, check=lambda output: None):
        self.titles.append(title)
        if title == "git clone":
            page = folder / "unskew" / newcomer.PAGE
            page.parent.mkdir(parents=True)
            page.write_text((ROOT / newcomer.PAGE).read_text())
        elif self.run is not None and title not in README_COMMANDS:
            assert check(self.run(command, folder)) is None, title


def test_the_path_begins_with_the_two_commands_of_the_readme(tmp_path):
    complete, short = Recorder(), Recorder()
    for walk, tests in ((complete, True), (short, False)):
        folder = tmp_path / str(tests)
        folder.mkdir()
        newcomer.walk_the_path(walk, folder, tests=tests)
    assert complete.titles[:3] == ["git clone", *README_COMMANDS]
    assert all(f"`{command}`" in (ROOT / "README.md").read_text() for command in README_COMMANDS)
    assert short.titles == [title for title in complete.titles if title != "make test"]


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_every_step_after_the_installation_gives_the_expected_result(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("unskew.comparison.references.BY_DEFAULT", True)

    def run(command, folder):
        monkeypatch.chdir(folder)
        if command[-1] == "tutorial.py":
            module = types.ModuleType("tutorial")
            monkeypatch.setitem(sys.modules, module.__name__, module)
            capsys.readouterr()
            exec((folder / command[-1]).read_text(), module.__dict__)
            return capsys.readouterr().out
        outcome = call(capsys, *command[1:])
        assert outcome.code == 0, outcome
        return outcome.out + outcome.err

    walk = Recorder(run)
    newcomer.walk_the_path(walk, tmp_path, tests=False)
    assert len(walk.titles) == 8


def test_the_table_has_clients_labels_categories_and_missing_values(tmp_path):
    newcomer.write_table(tmp_path / "visits.csv", 600, seed=0)
    with (tmp_path / "visits.csv").open() as file:
        rows = list(csv.DictReader(file))
    values = {column: {row[column] for row in rows} for column in newcomer.COLUMNS}
    assert (len(values["visit_id"]), len(values["clinic"]), len(values["admission"])) == (600, 4, 3)
    assert values["readmitted"] == {"yes", "no"}
    assert "" in values["pressure"]
    newcomer.write_table(tmp_path / "new.csv", 3, seed=1, labeled=False)
    assert "readmitted" not in (tmp_path / "new.csv").read_text()


def test_variables_of_the_checkout_and_of_make_are_not_passed_on(tmp_path):
    inherited = {"PATH": "/bin", "PYTHONPATH": "/here", "MAKEFLAGS": "ARGS=-x", "ARGS": "-x", "PIP_INDEX_URL": "mirror"}
    environment = newcomer.newcomer_environment(inherited | {"XDG_CACHE_HOME": "/warm"}, tmp_path)
    assert environment == {"PATH": "/bin", "PIP_INDEX_URL": "mirror", "XDG_CACHE_HOME": str(tmp_path)}


def test_a_step_that_fails_is_named_with_its_command_and_output(tmp_path):
    walk = Walk({}, show=lambda line: None)
    with pytest.raises(
        StepError, match=r"(?s)The step 'third' failed: exit code 3\..*\$ /bin/sh -c .*\nthe reason\n?$"
    ):
        walk.step("third", ["/bin/sh", "-c", "echo the reason >&2; exit 3"], tmp_path)
    assert walk.seconds == {}


def test_a_step_without_its_result_is_named(tmp_path):
    lines = []
    walk = Walk({}, show=lines.append)
    command = ["/bin/sh", "-c", "echo nothing"]
    with pytest.raises(StepError, match=r"(?s)The step 'compare' failed: the result lacks the verdict\..*nothing"):
        walk.step("compare", command, tmp_path, newcomer.contains(newcomer.VERDICT, "the verdict"))
    walk.step("echo", command, tmp_path, newcomer.contains("nothing", "the word"))
    assert list(walk.seconds) == ["echo"]
    assert [line.split()[0] for line in lines] == ["echo"]


@pytest.mark.parametrize(
    ("text", "output", "missing"),
    [
        ("label: readmitted # a\npartition: natural:clinic\n", "excluded: visit_id: an identifier", None),
        ("label: readmitted\npartition: natural:admission\n", "", "the line 'partition: natural:clinic'"),
        ("label: readmitted\npartition: natural:clinic\n", "excluded: admission: why", "'excluded: admission'"),
        (None, "", "the line 'label: readmitted'"),
    ],
)
def test_the_configuration_names_label_and_clients_and_keeps_the_columns(text, output, missing, tmp_path):
    if text is not None:
        (tmp_path / "experiment.yaml").write_text(text)
    found = newcomer.check_experiment(tmp_path / "experiment.yaml", output)
    assert found is None if missing is None else missing in found


@pytest.mark.parametrize(
    ("predicted", "missing"),
    [
        (["yes", "no", "no"], None),
        (["yes", "no"], "for each of 3 rows"),
        (["yes", "no", ""], "for each of 3 rows"),
        (["no", "no", "no"], "both predicted classes"),
        (None, "the file p.csv"),
    ],
)
def test_predictions_are_checked_row_by_row(predicted, missing, tmp_path):
    if predicted is not None:
        (tmp_path / "p.csv").write_text("row,predicted_readmitted\n" + "".join(f"0,{name}\n" for name in predicted))
    found = newcomer.check_predictions(tmp_path / "p.csv", 3)
    assert found is None if missing is None else missing in found


@pytest.mark.parametrize(
    ("accuracies", "missing"),
    [
        ([0.4, 0.9], None),
        ([0.4], "2 accuracies; it has 1"),
        ([0.4, 0.1], "an accuracy above 10%; one is 10.0%"),
        ([0.4, float("nan")], "an accuracy above 10%; one is nan%"),
        ([0.4, 1.1], "an accuracy above 10%; one is 110.0%"),
    ],
)
def test_accuracies_are_above_chance_and_at_most_one(accuracies, missing):
    assert newcomer.check_accuracies(accuracies, 0.1, 2) == missing


def test_a_run_without_a_summary_has_no_accuracy(tmp_path):
    assert newcomer.summary_accuracies(tmp_path) == []
    (tmp_path / "summary.json").write_text('{"accuracy": 0.75}')
    assert newcomer.summary_accuracies(tmp_path) == [0.75]
