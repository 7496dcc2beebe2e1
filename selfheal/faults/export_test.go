package faults

// NotCounted is for tests.
var NotCounted = notCounted
