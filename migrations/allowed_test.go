package migrations_test

// allowed lists exceptions from the rule of docs/upgrading.md, by change. Each has its reason: the release since which
// no program uses the dropped object, or the reason why the locked table is small.
var allowed = map[string]map[string]string{}
