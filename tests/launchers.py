"""Scripts under torchrun, on machines that are all this one; whatever happens, nothing is left.

with Launchers(tmp_path, script, machines=2) as launchers:
    launchers.wait_for("0", "1")        # what ranks have said by `Path(sys.argv[1], "0").touch()`
    launchers.kill(1, signal.SIGKILL)   # the torchrun of the second machine alone
    launchers.wait_for_all_to_end()
"""

from __future__ import annotations

import contextlib
import os
import signal
import textwrap
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from ranks import preload, start_python

from recipes.bench.hosts import free_port

preload("mpcomp.healing", "torch.distributed.run")

#: Seconds for anything: for what hangs, as a busy machine takes minutes.
LIMIT_S = 180


class Launchers:
    """The torchruns of a script, one a machine.

    Args:
        folder: for the script, what its ranks say, and what they print.
        script: given ``folder`` as its first argument.
        machines: number of torchruns.
        ranks: of each.
        options: of torchrun.
        by_hand: start the ranks without torchrun, which are then what is sent signals.
        arguments: of the script, after the folder.
    """

    def __init__(
        self,
        folder: Path,
        script: str,
        *arguments: str,
        machines: int = 1,
        ranks: int = 1,
        options: tuple[str, ...] = (),
        by_hand: bool = False,
    ) -> None:
        self.folder = folder
        self.script = folder / "script.py"
        self.script.write_text(textwrap.dedent(script))
        port = free_port()
        command = [str(self.script), str(folder), *arguments]
        torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *options]
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self._processes: list[BaseProcess] = []
        self._starts: list[tuple[list[str], dict[str, str]]] = []
        for number in range(ranks if by_hand else machines):
            own: dict[str, str] = {}
            if by_hand:
                own = {**address, "RANK": str(number), "WORLD_SIZE": str(ranks)}
                launcher = []
            elif machines == 1:
                launcher = [*torchrun, "--standalone"]
            else:
                launcher = [*torchrun, f"--nnodes={machines}", f"--node-rank={number}"]
                launcher += ["--master-addr=127.0.0.1", f"--master-port={port}"]
            self._starts.append(([*launcher, *command], own))
            self._processes.append(self._started(number))

    def _started(self, number: int) -> BaseProcess:
        arguments, own = self._starts[number]
        return start_python(
            *arguments,
            environment=own,
            printed=self.folder / f"printed-{number}",
            folder=self.folder,
        )

    def __enter__(self) -> Launchers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for number in self.running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)

    def printed(self) -> str:
        """All that was printed, by machine."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("printed-*")))

    def running(self) -> list[int]:
        """Numbers of the processes of the script, forks and torchruns included: all print here."""
        found = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                number = int(folder.name)
                if (folder / "fd" / "1").readlink().parent == self.folder:
                    found.append(number)
        return found

    def wait_for(self, *names: str) -> None:
        """Waits until the ranks have made files of these names."""
        self._wait(lambda: all((self.folder / name).exists() for name in names), f"no {names}")

    def kill(self, machine: int, number: signal.Signals) -> None:
        """Sends a signal to the torchrun of a machine alone."""
        os.kill(self._processes[machine].pid, number)

    def start_again(self, machine: int) -> None:
        """Starts the torchrun of a machine again, once it has ended, as a supervisor would."""
        self._end_of(self._processes[machine])
        self._processes[machine] = self._started(machine)

    def wait_for_all_to_end(self) -> list[int]:
        """Waits until no process of the script is there; the exit statuses of the torchruns."""
        statuses = [self._end_of(process) for process in self._processes]
        self._wait(lambda: not self.running(), "some are left")
        return statuses

    def _end_of(self, process: BaseProcess) -> int:
        process.join(LIMIT_S)
        assert process.exitcode is not None, f"a launcher has not ended:\n{self.printed()}"
        return process.exitcode

    def _wait(self, is_so, otherwise: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not is_so():
            assert time.monotonic() < deadline, f"{otherwise}:\n{self.printed()}"
            time.sleep(0.05)
