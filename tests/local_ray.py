"""How tests start a Ray of their own on this machine: `ray.init("local", **LOCAL_RAY)`."""

LOCAL_RAY = {
    "num_cpus": 2,
    "object_store_memory": 150 * 2**20,
    "include_dashboard": False,
    "log_to_driver": False,
    "logging_level": "error",
}
