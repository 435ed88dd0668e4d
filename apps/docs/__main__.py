"""`uv run apps/docs`."""

import importlib.util
import os
import sys

if __name__ == "__main__":
    if importlib.util.find_spec("rl_docs") is None:  # the base install has no tools for documents
        uv = os.environ.get("UV", "uv")
        os.execvp(uv, [uv, "run", "--locked", "--group", "docs", "python", "-m", "rl_docs", *sys.argv[1:]])
    from rl_docs.cli import main

    sys.exit(main())
