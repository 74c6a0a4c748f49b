"""Ranks of one Linux host read one another's memory instead of sending over Gloo.

transport   the transport
rendezvous  whether ranks share a host and may read one another
peers       notes between them
attach      cross memory attach (process_vm_readv)
"""
