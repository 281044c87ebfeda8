"""Serving: prefixes computed ahead of ranking (relay-race inference), and the processes around it.

    engine/        a bundle that prefills, ranks and retrieves
    cache/         prefixes on the device, on the host, and being computed
    instance/      an engine with its compute thread: what is admitted, what runs next
    router/        which instance gets a request
    http/          endpoints, messages, limits, apps, processes, client
    supervisor.py  a router and its instances on one machine
    cluster_config.py  what several machines share
    ray.py         instances that Ray places over machines

Touch this file when a public name is added.
"""

from typing import TYPE_CHECKING

from slipstream._lazy import exporter

if TYPE_CHECKING:
    from slipstream.serving.cache.expander import Expander as Expander
    from slipstream.serving.cache.prefix_cache import PrefixCache as PrefixCache
    from slipstream.serving.clock import Clock as Clock
    from slipstream.serving.engine.encoding import EncodedHistory as EncodedHistory
    from slipstream.serving.engine.engine import Engine as Engine
    from slipstream.serving.engine.prefix import Prefix as Prefix
    from slipstream.serving.http.client import AsyncClient as AsyncClient
    from slipstream.serving.http.client import Client as Client
    from slipstream.serving.http.client import RefusalError as RefusalError
    from slipstream.serving.http.client import UnreachableError as UnreachableError
    from slipstream.serving.http.messages import HistoryMessage as HistoryMessage
    from slipstream.serving.instance.cost_model import CostModel as CostModel
    from slipstream.serving.instance.instance import Instance as Instance
    from slipstream.serving.instance.instance_config import Admission as Admission
    from slipstream.serving.instance.instance_config import InstanceConfig as InstanceConfig
    from slipstream.serving.instance.instance_config import RankResult as RankResult
    from slipstream.serving.instance.scheduler import Scheduler as Scheduler
    from slipstream.serving.instance.trigger import Trigger as Trigger
    from slipstream.serving.instance.trigger import TriggerConfig as TriggerConfig
    from slipstream.serving.ray import relay_app as relay_app
    from slipstream.serving.request_errors import BadRequest as BadRequest
    from slipstream.serving.request_errors import DeadlineError as DeadlineError
    from slipstream.serving.request_errors import OverloadError as OverloadError
    from slipstream.serving.router.balancer import LoadBalancer as LoadBalancer
    from slipstream.serving.router.ticket import TicketSigner as TicketSigner
    from slipstream.serving.supervisor import DeploymentConfig as DeploymentConfig
    from slipstream.serving.supervisor import Supervisor as Supervisor

__all__ = [
    "Admission",
    "AsyncClient",
    "BadRequest",
    "Client",
    "Clock",
    "CostModel",
    "DeadlineError",
    "DeploymentConfig",
    "EncodedHistory",
    "Engine",
    "Expander",
    "HistoryMessage",
    "Instance",
    "InstanceConfig",
    "LoadBalancer",
    "OverloadError",
    "Prefix",
    "PrefixCache",
    "RankResult",
    "RefusalError",
    "Scheduler",
    "Supervisor",
    "TicketSigner",
    "Trigger",
    "TriggerConfig",
    "UnreachableError",
    "relay_app",
]
__getattr__, __dir__ = exporter(
    __name__,
    {
        "Admission": "instance.instance_config",
        "AsyncClient": "http.client",
        "BadRequest": "request_errors",
        "Client": "http.client",
        "Clock": "clock",
        "CostModel": "instance.cost_model",
        "DeadlineError": "request_errors",
        "DeploymentConfig": "supervisor",
        "EncodedHistory": "engine.encoding",
        "Engine": "engine.engine",
        "Expander": "cache.expander",
        "HistoryMessage": "http.messages",
        "Instance": "instance.instance",
        "InstanceConfig": "instance.instance_config",
        "LoadBalancer": "router.balancer",
        "OverloadError": "request_errors",
        "Prefix": "engine.prefix",
        "PrefixCache": "cache.prefix_cache",
        "RankResult": "instance.instance_config",
        "RefusalError": "http.client",
        "Scheduler": "instance.scheduler",
        "Supervisor": "supervisor",
        "TicketSigner": "router.ticket",
        "Trigger": "instance.trigger",
        "TriggerConfig": "instance.trigger",
        "UnreachableError": "http.client",
        "relay_app": "ray",
    },
)
