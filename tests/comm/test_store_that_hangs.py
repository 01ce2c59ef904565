"""A process whose store no longer answers ends with its own status, and does not abort."""

import os
import signal
import subprocess
import sys

PROGRAM = """
import os, signal, subprocess, sys
from datetime import timedelta
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import TCPStore
from mpcomp.comm.failures import Faults, Waits

SERVER = '''
import time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
'''
server = subprocess.Popen(
    [sys.executable, "-c", SERVER],
    stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
)
try:
    port = int(server.stdout.readline())
    store = TCPStore("127.0.0.1", port, timeout=timedelta(seconds=500))
    faults = Faults(
        PrefixStore("x", PrefixStore("y", store)), 0, 2, 1.0, Waits(),
        name_of=str, where=str, close=lambda: None,
    )
    server.send_signal(signal.SIGSTOP)
    os.waitpid(server.pid, os.WUNTRACED)  # it has stopped: a signal takes its time
    assert faults._answered(lambda: store.check(["a"])) is None
finally:
    print(server.pid, flush=True)
sys.exit(7)
"""


def test_a_thread_that_waits_for_the_store_is_let_go():
    """The server is frozen until the process has ended; only its connection can end the wait."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300
    )
    os.kill(int(done.stdout), signal.SIGKILL)
    assert done.returncode == 7 and "terminate called" not in done.stderr, done.stderr
