package retention

// For tests of the package.
var (
	Prune     = prune
	Retirable = retirable
	Note      = note
)

// Remove is the statement that deletes rows of a kind.
func Remove(name string) string { return kinds[name].remove }
