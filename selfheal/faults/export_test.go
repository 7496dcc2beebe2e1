package faults

// NotCounted exports notCounted for tests.
var NotCounted = notCounted
