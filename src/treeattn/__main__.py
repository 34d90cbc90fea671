"""``python -m treeattn`` is the ``treeattn`` command."""

from .cli import main

raise SystemExit(main())
