"""`corral down`: ends what `corral up` started on this node, and nothing else."""

from corral.cluster.ray_node import stop_ray
from corral.recipe.errors import UserError
from corral.runtime.membership import RECORD, Membership, marked_processes, process_command, state_folder

TRAINING = "corral.cli.main train"


def down(port: int | None, is_forced: bool) -> list[tuple[Membership, int]]:
    """Of one cluster, or of all that this node is part of. Returns them with how many processes were ended."""
    records = [Membership.read(record) for record in sorted(state_folder().glob(f"ray-*/{RECORD}"))]
    found = [member for member in records if member is not None and port in (None, member.port)]
    for member in found:
        if not is_forced and (busy := runs_of(member)):
            raise UserError(
                f"training runs on this node (process {', '.join(map(str, busy))}): stop it first, which saves it "
                "(`corral jobs`, `corral stop JOB`, or Ctrl-C where it runs), or lose what was not saved with --force"
            )
    return [(member, stop_ray(member)) for member in found]


def runs_of(member: Membership) -> list[int]:
    return [pid for pid, _ in marked_processes(member.mark) if TRAINING in process_command(pid)]
