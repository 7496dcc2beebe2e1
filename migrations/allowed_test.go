package migrations_test

// allowed lists what changes do against the rule of docs/upgrading.md, each with the reason why nobody minds: the release since
// which nothing uses what goes, or why what is locked is small.
var allowed = map[string]map[string]string{}
