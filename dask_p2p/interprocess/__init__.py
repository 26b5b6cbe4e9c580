"""RPC, memory that processes share or read, and checks of received values."""
