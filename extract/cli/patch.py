"""`extract patch`: the change of a vendor's source tree, for who builds that tree."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from extract.cli.options import json_option
from extract.patching import DEFAULT_PATCH
from extract.report import emit

if TYPE_CHECKING:
    from extract.patching import Change, Check
    from extract.patching.patch import ShippedPatch

REFUSED = 4


@click.command("patch")
@click.argument("action", metavar="list|check|apply|revert", type=click.Choice(["list", "check", "apply", "revert"]))
@click.option(
    "--tree",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Root of the vendor's source tree, a site-packages directory, or the tensorrt_llm folder in one.  "
    "[required but for list]",
)
@click.option(
    "--kind",
    type=click.Choice(["tokens", "last"]),
    default="tokens",
    show_default=True,
    help="Of apply: which states to mark, of all tokens or of each sequence's last.",
)
@click.option("--patch", "name", metavar="NAME|FILE", default=DEFAULT_PATCH, show_default=True, help="Which patch.")
@click.option("--dry-run", is_flag=True, help="Print the change and make none.")
@json_option
def patch_command(action: str, tree: Path | None, kind: str, name: str, dry_run: bool, as_json: bool) -> None:
    """Mark the hidden states in a vendor's source tree.

    `extract build` does not need it. It is for who builds engines with the tools of TensorRT-LLM 0.16 to 1.2.x: two
    lines in its decoder base class make the final norm's output an extra output, `extract_hidden_states`, of every
    engine built from then on. The place is found by structure, all other bytes stay, and whatever is not as expected is
    refused. `check` says whether a tree is patched, can be, and which of its models the patch misses.

    \b
    Example:
        extract patch check --tree TensorRT-LLM
        extract patch apply --tree TensorRT-LLM --dry-run
    """
    from extract.patching import apply, check, revert
    from extract.patching.patch import load_patch, shipped_patches

    if action == "list":
        emit(shipped_patches(), list_text, as_json)
        return
    if tree is None:
        raise click.UsageError(f"{action} needs a tree: give --tree DIR.")
    patch = load_patch(name)
    if action == "check":
        found = check(tree, patch)
        emit(found, check_text, as_json)
        if found.problem:
            click.get_current_context().exit(REFUSED)
    elif action == "apply":
        emit(apply(tree, patch, kind, dry_run=dry_run), change_text, as_json)
    else:
        emit(revert(tree, patch, dry_run=dry_run), change_text, as_json)


def list_text(found: "tuple[ShippedPatch, ...]") -> str:
    """What can be applied."""
    lines = []
    for one in found:
        lines += [
            f"patch      {one.name}, version {one.patch.version}, for {one.patch.package} {one.patch.releases}",
            f"does       {one.patch.summary}",
            f"file       {one.patch.file}, {one.patch.method}",
        ]
        for kind in one.patch.kinds:
            lines += [
                f"{kind.name:<10} {kind.summary}",
                f"             {kind.anchor}",
                *(f"           + {line}" for line in kind.lines),
            ]
    return "\n".join(lines)


def check_text(found: "Check") -> str:
    """How a tree stands to a patch."""
    if found.kind is not None:
        state = f"patched ({found.kind})"
    else:
        state = "refused" if found.problem else "not patched, can be"
    lines = [f"file       {found.path}", f"release    {found.release or 'unknown'}", f"state      {state}"]
    if found.problem:
        lines.append(f"problem    {found.problem}")
    else:
        lines.append(f"kinds      {', '.join(found.applicable)}")
    lines.append(f"reached    {found.reach.num_reached:,} models of the vendor's table")
    lines += [f"unread     {file}: no Python that can be read" for file in found.reach.unread]
    for one in found.reach.unreached:
        about = f" ({one.about})" if one.about else ""
        lines.append(f"missed     {one.model}: {one.why}{about}")
    return "\n".join(lines)


def change_text(found: "Change") -> str:
    """What was done."""
    if found.action == "apply":
        done = "applied" if found.written else "to apply" if found.changed else "unchanged"
        note = f"kind {found.kind}" if found.changed else f"it is patched already, kind {found.kind}"
    else:
        done = "reverted" if found.written else "to revert" if found.changed else "unchanged"
        note = f"kind {found.kind}" if found.changed else "it is not patched"
    if found.changed and not found.written:
        note += "; a dry run: nothing was changed"
    return f"{found.diff}{done:<10} {found.path}: {note}"
