"""Ranks of one Linux host read one another's memory instead of sending over Gloo.

transport   whether ranks share a host and may read one another, notes between them, and the transport
attach      cross memory attach (process_vm_readv)
"""
