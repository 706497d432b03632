"""`python -m medusa`: the same program as the console script `medusa`."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    main()
