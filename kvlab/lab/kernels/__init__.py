"""The Triton kernels compiled ahead of time, on a machine without a GPU: what the compiler made of them, and what they cost.

shapes     layers and batches of served models
configs    the production configurations, each as the launches that a real call makes
cost       bytes a configuration must move, operations, and the time both take at best
compiling  a launch compiled for a target
reading    what the compiled code says: registers, spills, loads, tensor cores
rules      what must hold, and the exceptions with their reasons
report     all of it as rows
"""
