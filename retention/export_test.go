package retention

// The tests use these unexported functions.
var (
	Prune     = pruneBatch
	Retirable = retirable
	Mark      = mark
)

// DeleteSQL returns the statement that deletes rows of a kind.
func DeleteSQL(name string) string { return kinds[name].deleteSQL }
