"""`corral down`: ends what `corral up` started on this node, and nothing else."""

from corral.cluster.ports import talks_to
from corral.cluster.ray_node import stop_ray
from corral.recipe.errors import UserError
from corral.runtime.membership import RECORD, Membership, marked_processes, state_folder
from corral.runtime.presence import present


def down(port: int | None, is_forced: bool) -> list[tuple[Membership, int]]:
    """Of one cluster, or of all that this node is part of. Returns them with how many processes were ended."""
    records = [Membership.read(record) for record in sorted(state_folder().glob(f"ray-*/{RECORD}"))]
    found = [member for member in records if member is not None and port in (None, member.port)]
    for member in found:
        if not is_forced and (runs := runs_of(member)):
            raise UserError(
                f"{' and '.join(runs)} trains on this node: stop it first, which saves it (`corral stop JOB`, or "
                "Ctrl-C where it runs), or lose what was not saved with --force"
            )
    return [(member, stop_ray(member)) for member in found]


def runs_of(member: Membership) -> list[str]:
    """Those with workers here, or whose controller is here and uses this cluster, whoever started it."""
    own = {pid for pid, _ in marked_processes(member.mark)}
    return sorted({one.run for one in present() if one.pid in own or talks_to(one.pid, member.port)})
