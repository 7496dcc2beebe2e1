package redact

// parameters are the parts of a URL or of a header that carry a secret under a name of a few letters.
var parameters = []rule{
	{
		name: "query", keywords: queryKeywords(),
		look: `(?i)(?:[?&]|0026|amp;)(?:key|sig|signature|code|x-(?:amz|goog)-signature)=([^&\s"'#]{8,})`,
	},
	{
		name: "bearer", keywords: []string{"bearer"}, bounded: true,
		look: `(?i)bearer[ \t]+([A-Za-z0-9._~+/=-]{6,})`,
	},
	{ // the letters that base64 gives a "user:password" are never all of one case
		name: "basic", keywords: []string{"basic"}, bounded: true,
		look: `(?:[Bb]asic|BASIC)[ \t]+([A-Za-z0-9+/]*(?:[a-z][A-Z]|[A-Z][A-Z]|[0-9])[A-Za-z0-9+/]*=*)`,
	},
}

// queryKeywords are the parameters with the sign before them, which JSON and HTML may have escaped.
func queryKeywords() []string {
	var all []string
	for _, sign := range []string{"?", "&", "0026", "amp;"} {
		for _, name := range []string{"key=", "sig=", "signature=", "code=", "x-amz-signature=", "x-goog-signature="} {
			all = append(all, sign+name)
		}
	}
	return all
}
