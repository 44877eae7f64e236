"""The command line: `artifact VERB`; every verb says what it takes with --help.

A verb prints for people, or one flat JSON object with --json. Exit codes: 0 done, 1 a claim or a cell failed (the
verb returns 1), 2 bad input or environment, 130 interrupted. Verbs import what they need when they are called, so
that each starts at once.
"""

import json
import sys
from collections.abc import Sequence

import click


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="prr-kvpimple-artifact", prog_name="artifact")
def cli() -> None:
    """Regenerate, check and take apart the results of PRR and KV-PIMple."""


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="One flat JSON object instead of a table.")
def env(as_json: bool) -> None:
    """What this machine is, what is installed against the pins, which tiers can run, which simulators are found."""
    from artifact.study import provenance

    found = provenance.environment()
    if as_json:
        click.echo(json.dumps(found))
        return
    rows = {key: value for key, value in found.items() if not key.endswith("_reason")}
    rows["checkout"] = found["checkout"] or "none, an installed package"
    rows["memory_bytes"] = f"{found['memory_bytes'] / 2**30:.1f} GiB"
    rows["chromium"] = found["chromium"] or f"not found, so no still images: {provenance.CHROMIUM_ADVICE}"
    rows["attacc"] = found["attacc"] or "not found: set ATTACC_DIR to its folder"
    rows["ramulator"] = found["ramulator"] or "not found: set RAMULATOR_DIR to its folder"
    for tier in ("tier_cpu", "tier_model", "tier_gpu"):
        rows[tier] = "yes" if found[tier] else f"no, {found[f'{tier}_reason']}"
    for key, value in rows.items():
        text = (", ".join(value) or "none") if isinstance(value, list) else "unknown" if value is None else value
        click.echo(f"{key.removesuffix('_bytes').removesuffix('_count').replace('_', ' '):<17} {text}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns its exit code; the only place where an error becomes a line on stderr.

    `argv`: the arguments after the program's name; None = the process's own.
    """
    try:
        code = cli.main(args=None if argv is None else list(argv), prog_name="artifact", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help())
        return 0
    except click.ClickException as error:
        return _fail(_usage(error))
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted; finished results are kept", code=130)
    except (ValueError, OSError) as error:
        return _fail(str(error) or type(error).__name__)
    return code if isinstance(code, int) else 0


def _usage(error: click.ClickException) -> str:
    message = error.format_message()
    context = getattr(error, "ctx", None)
    if context is None:
        return message
    if isinstance(context.command, click.Group):
        message += f" Allowed: {', '.join(context.command.list_commands(context))}."
    return f"{message} See `{context.command_path} --help`."


def _fail(message: str, code: int = 2) -> int:
    click.echo(f"artifact: {' '.join(message.split())}", err=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
