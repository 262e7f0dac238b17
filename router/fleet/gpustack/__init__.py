"""GPUStack 2.x: what its server tells of model instances, and how one of them is restarted.

`api` speaks to the server; `recycle` restarts or replaces one instance. That its instances are nodes is told by
`router.fleet.discovery.gpustack`.
"""

from router.fleet.gpustack.api import Gpustack, Instance, node_name
from router.fleet.gpustack.recycle import Restarts

__all__ = ["Gpustack", "Instance", "Restarts", "node_name"]
