package redact

// keyBlocks are files of private keys. A block that never ends is removed to the end of the text.
var keyBlocks = []rule{
	{
		name: "pem", keywords: []string{"-----begin"},
		look: `(?s)-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----|\z)`,
	},
	{
		name: "ssh2", keywords: []string{"---- begin ssh2"},
		look: `(?s)---- BEGIN SSH2 [A-Z ]*PRIVATE KEY ----.*?(?:---- END SSH2 [A-Z ]*PRIVATE KEY ----|\z)`,
	},
	{
		name: "putty", keywords: []string{"putty-user-key-file-"}, bounded: true,
		look: `(?s)PuTTY-User-Key-File-\d+:.*?(?:` + puttyEnd + `|\z)`,
	},
	{
		name: "putty private lines", keywords: []string{"private-lines:"}, bounded: true,
		look: `(?s)Private-Lines:\s*\d.*?(?:` + puttyEnd + `|\z)`,
	},
}

// puttyEnd is the last line of a PuTTY key.
const puttyEnd = `Private-(?:MAC|Hash):\s*[0-9A-Fa-f]*`
