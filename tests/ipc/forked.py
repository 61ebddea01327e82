"""A module that runs in a fork: it prints what it finds, in JSON, and ends as its first argument says."""

import gc
import json
import os
import signal
import sys

if __name__ == "__main__":
    held = os.sysconf("SC_OPEN_MAX") if len(sys.argv) < 3 else int(sys.argv[2])
    facts = {
        "argv": sys.argv,
        "pid": os.getpid(),
        "session": os.getsid(0),
        "descriptors": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],  # the last one lists them
        "holds": os.path.exists(f"/proc/self/fd/{held}"),
        "word": sys.stdin.readline(),
        "variables": {name: value for name, value in os.environ.items() if name.startswith("OF_")},
        "has_decimal": "decimal" in sys.modules,
        "title": open("/proc/self/cmdline").read().rstrip("\0").replace("\0", " ").split()[1:],  # noqa: SIM115
        "pipes": signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN,
        "is_collecting": gc.isenabled(),
    }
    print(json.dumps(facts))
    print("a line of errors", file=sys.stderr)
    match sys.argv[1]:
        case "code":
            sys.exit(7)
        case "sentence":
            sys.exit("it ends")
        case "error":
            raise ValueError("a fault")
        case "signal":
            os.kill(os.getpid(), signal.SIGKILL)
