"""Terrace as a KV connector of vLLM: `--kv-transfer-config '{"kv_connector":"TerraceConnector","kv_role":"kv_both"}'`.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`); nothing else is imported until the
connector is asked for.
"""

import contextlib
import time

BEGAN = time.time()  # vLLM loads its plugins first, its weights later.


def register() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):  # A process may load its plugins twice.
        KVConnectorFactory.register_connector("TerraceConnector", "terrace_kv.vllm.connector", "TerraceConnector")
