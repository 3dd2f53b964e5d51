"""The command line, ``python -m tflms``: finds the command's module and runs it."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Sequence

from rich.console import Console

from tflms import __version__
from tflms.errors import TflmsError

# Modules are imported when their command is called, so that help is there at once.
COMMANDS = {
    "demo": ("tflms.commands.demo", "a 3D U-Net runs out of memory, and trains once rewritten"),
    "report": ("tflms.commands.report", "print a saved report, or ask it about an operation"),
    "plan": ("tflms.commands.plan", "tell what a rewrite of a saved graph would do"),
    "rewrite": ("tflms.commands.rewrite", "rewrite a saved graph"),
    "bench": ("tflms.commands.bench", "measure: largest batch, solver and others"),
    "rules": ("tflms.commands.rules", "list the rules, or print one with its examples"),
    "doctor": ("tflms.commands.doctor", "check the installation"),
    "local-run": ("tflms.commands.local_run", "train by local updates, one process per chunk"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status."""
    known = {name: entry for name, entry in COMMANDS.items() if importlib.util.find_spec(entry[0])}
    listing = "\n".join(f"  {name:10} {told}" for name, (_, told) in known.items())
    parser = argparse.ArgumentParser(
        prog="python -m tflms",
        description="Train TensorFlow models that do not fit in the accelerator's memory.",
        epilog=f"commands:\n{listing}\n\npython -m tflms COMMAND --help tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tflms {__version__}")
    parser.add_argument("command", choices=known, metavar="COMMAND", help="one of those below")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    args = parser.parse_args(arguments)
    name, told = known[args.command]
    try:
        module = importlib.import_module(name)
        command = argparse.ArgumentParser(
            prog=f"python -m tflms {args.command}", description=told[0].upper() + told[1:] + "."
        )
        module.add_arguments(command)
        return int(module.run(command.parse_args(args.rest)))
    except TflmsError as error:
        complain = Console(stderr=True, soft_wrap=True, highlight=False)
        complain.print(f"tflms: {error}", markup=False)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
