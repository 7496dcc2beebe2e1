package retention

// For tests of the package.
var (
	Prune     = prune
	Retirable = retirable
	Mark      = mark
)

// Remove is the statement that deletes rows of a kind.
func Remove(name string) string { return kinds[name].remove }
