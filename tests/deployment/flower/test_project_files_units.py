"""The commands of the units carry out a run. Skipped where Flower's environment is not made."""

import signal
import subprocess

from support.flower_processes import FLOWER, environment, processes_of, real
from support.service_files import ONE, UNITS, Unit, installed

import unskew
from unskew.deployment.flower.superlinks import free_port

pytestmark = real


def test_the_commands_of_the_units_carry_out_a_run():
    """Only paths, ports and the name of the server are replaced; the environment is that of the units."""
    with installed() as folder:
        ports = {"8001": free_port(), "9094": free_port()}
        address = f"localhost:{ports['8001']}"
        replaced = {
            "/opt/unskew/bin": str(FLOWER),
            "/srv/unskew": str(folder),
            "superlink.example.org:8000": address,
            "127.0.0.1 --port 8001": f"127.0.0.1 --port {ports['8001']}",
            "--port 9094": f"--port {ports['9094']}",
        }
        for file in (*UNITS.values(), "site/site.yaml"):
            text = (folder / file).read_text()
            for old, new in replaced.items():
                text = text.replace(old, new)
            if file == "site/site.yaml":
                text = f"{text.partition('data:')[0]}data: split\nlimits:{text.partition('limits:')[2]}"
            (folder / file).write_text(text)
        running = []

        def start(name):
            unit = Unit(folder / UNITS[name])
            variables = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1", **unit.environment}
            with (folder / f"{name}.log").open("w") as log:
                running.append(subprocess.Popen(unit.command, cwd=unit.folder, env=variables, stdout=log, stderr=log))

        def deploy(*words):
            done = subprocess.run(
                [str(FLOWER / "unskew"), "deploy", *words], cwd=folder, env=environment(folder),
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert done.returncode == 0, (done.stdout, done.stderr)

        try:
            start("superlink")
            start("site")
            deploy("register", "site/node.pub", "--superlink", address)
            deploy("check", "site/site.yaml")
            start("supernode")  # before the registration it would end, and systemd would start it again
            deploy("run", "experiment.yaml", "--folder", ".", "--superlink", address, "--out", "runs/first")
        finally:
            for process in running:
                process.send_signal(signal.SIGTERM)
            for process in running:
                process.wait(30)
        unskew.run(out=folder / "simulated", **ONE)
        first, second = ((folder / name / "model.safetensors").read_bytes() for name in ("runs/first", "simulated"))
        assert first == second
        assert processes_of(folder) == []
