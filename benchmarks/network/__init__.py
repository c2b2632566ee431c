"""A lab of several hosts on one machine: network namespaces, a switch, and links of a given speed."""
