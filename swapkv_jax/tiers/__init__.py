"""Where KV lives when it is not on the device: DRAM pool and disk store."""
