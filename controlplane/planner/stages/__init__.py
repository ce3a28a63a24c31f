"""Plans of length-specialised stages: what the workers tell of lengths becomes a layout in the state store.

`manager` decides when to plan and remembers how boundaries moved; `making` turns lengths into a record (pure);
`collecting` asks the workers; `service` serves `penstock.v1.StagePlanner`.
"""
