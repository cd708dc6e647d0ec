"""Let the named files end with exactly one newline; the exit code is 1 if one was changed."""

import sys
from pathlib import Path

changed = False
for name in sys.argv[1:]:
    content = Path(name).read_bytes()
    wanted = content.rstrip(b"\n") + b"\n" if content.strip() else b""
    if content != wanted:
        Path(name).write_bytes(wanted)
        print(f"{name}: fixed its end")
        changed = True
sys.exit(changed)
