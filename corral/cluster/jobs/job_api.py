"""Client of a cluster's job API, which the dashboard serves over HTTP on the head node. Where `corral up` started it,
it listens on the head's loopback only, unless an option says otherwise."""

import logging
import os
from typing import Any
from urllib.parse import urlsplit

from corral.cluster.addresses import own_addresses
from corral.recipe.errors import UserError, first_line
from corral.runtime.membership import find_membership, own_memberships
from corral.runtime.network import answers, is_loopback, is_numeric
from corral.runtime.token import use_token_of

try:
    import requests
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient
except ImportError as error:
    raise UserError("jobs need Ray: pip install 'corral[cluster]'") from error

REQUEST_S = 30.0
VERBOSE_LOGGERS = (
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.runtime_env.packaging",
    "ray._private.runtime_env.working_dir",
)
FROM_ELSEWHERE = (
    "run this on the head node; or forward its port, `ssh -L {port}:127.0.0.1:{port} {head}`, and add "
    "`--address http://127.0.0.1:{port}`; or start the head with `corral up --dashboard-host 0.0.0.0`"
)
PORT = 8265
VARIABLE = "RAY_API_SERVER_ADDRESS"


class JobApi(JobSubmissionClient):  # type: ignore[misc]
    """Ray's own client, with a timeout for every request and errors in one line."""

    def __init__(self, url: str) -> None:
        for name in VERBOSE_LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)
        self.url = url
        before = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = url  # or RAY_ADDRESS would be taken, whatever is passed here
        try:
            super().__init__(url)
        finally:
            os.environ.pop(VARIABLE)
            if before is not None:
                os.environ[VARIABLE] = before

    @property
    def is_on_head(self) -> bool:
        """Whether this is the head node."""
        return any(member.is_head and member.dashboard == self.url for member in own_memberships())

    def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
        try:
            return super()._do_request(method, endpoint, timeout=REQUEST_S, **options)
        except AuthenticationError as error:
            raise UserError(
                f"the cluster at {self.url} refuses this token; copy the head's ~/.corral/token to this machine, or "
                "set RAY_AUTH_TOKEN_PATH"
            ) from error
        except requests.RequestException as error:
            raise no_answer(self.url) from error

    def put_package(self, name: str, content: bytes) -> None:
        """Stores content among the packages of code that jobs bring, which cannot be listed or read over HTTP."""
        response = self._do_request("PUT", f"/api/packages/gcs/{name}", data=content)
        if response.status_code != requests.codes.ok:
            self._raise_error(response)


def open_jobs(address: str | None = None) -> JobApi:
    """Connects to the cluster whose dashboard, or head process, is at `address`; else to that of Ray's own variables;
    else to the one that this node is part of."""
    url = find_dashboard(address)
    parts = urlsplit(url)
    bypass_proxies(parts.hostname or "")
    if not answers(f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}"):
        raise no_answer(url)
    try:
        return JobApi(url)
    except (RuntimeError, ValueError, KeyError, requests.RequestException) as error:
        raise UserError(f"{url} is not the dashboard of a Ray cluster: {first_line(error)}") from error


def find_dashboard(address: str | None) -> str:
    """URL of the dashboard. The cluster's token is used from here on."""
    named = address or os.environ.get(VARIABLE) or os.environ.get("RAY_ADDRESS") or None
    if named == "auto":
        named = None
    if named is not None and "://" in named:
        if not named.startswith(("http://", "https://")):
            raise UserError(f"{named} is not the address of a dashboard, such as http://HEAD:{PORT}")
        url = named.rstrip("/")
        use_token_of(next((member for member in own_memberships() if member.dashboard == url), None))
        return url
    member = find_membership(named)
    use_token_of(member)
    if member is not None:
        url = member.dashboard or query_head(member.address)
        if not member.is_head:
            refuse_loopback(url, member.address.rpartition(":")[0])
        return url
    if named is not None and speaks_http(named):
        return f"http://{named}"
    return query_head(named)


def query_head(address: str | None) -> str:
    """URL of the dashboard, as the head process knows it also of a cluster that `corral up` did not start."""
    from ray._private.ray_constants import DASHBOARD_ADDRESS, KV_NAMESPACE_DASHBOARD
    from ray._private.services import find_bootstrap_address

    from corral.cluster.gcs import Gcs

    head = address or find_bootstrap_address(None)
    if head is None:
        how = FROM_ELSEWHERE.format(port=PORT, head="HEAD")
        raise UserError(f"this machine is not part of a cluster that runs: {how}")
    known = Gcs(head).get_of_ray(DASHBOARD_ADDRESS.encode(), KV_NAMESPACE_DASHBOARD)
    if not known:
        raise UserError(f"the cluster at {head} was started without a dashboard, and jobs need one")
    url, host = f"http://{known.decode()}", head.rpartition(":")[0]
    if host not in (*own_addresses().values(), "localhost") and not is_loopback(host):
        refuse_loopback(url, host)
    return url


def refuse_loopback(url: str, head: str) -> None:
    """Raises for a loopback address of another machine: here it would be another dashboard, or none."""
    parts = urlsplit(url)
    if is_loopback(parts.hostname or ""):
        how = FROM_ELSEWHERE.format(port=parts.port, head=head)
        raise UserError(f"the dashboard listens on the loopback of the head node, {head}, only: {how}")


def speaks_http(address: str) -> bool:
    """Tells the dashboard, which does, from Ray's head process, which does not."""
    if not answers(address):
        raise no_answer(f"http://{address}")
    bypass_proxies(address.rpartition(":")[0])
    try:
        requests.get(f"http://{address}/api/version", timeout=REQUEST_S)
    except requests.RequestException:
        return False
    return True


def no_answer(url: str) -> UserError:
    how = FROM_ELSEWHERE.format(port=urlsplit(url).port or PORT, head="HEAD")
    return UserError(f"no dashboard of a Ray cluster answers at {url}: {how}")


def bypass_proxies(host: str) -> None:
    """Keeps requests to a node of the cluster away from a proxy that the environment names for the internet. (Names may
    be known to the proxy only.)"""
    if not is_numeric(host):
        return
    for name in ("no_proxy", "NO_PROXY"):
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), host]))
