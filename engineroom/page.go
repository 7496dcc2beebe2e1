package engineroom

import (
	"context"
	"time"
)

// page is a page of the Engine Room.
type page struct {
	path     string // in the form of http.ServeMux; "/" is the overview
	name     string // of its templates: <name> arranges the parts, <name>/<part> is a part
	navLabel string // label in the navigation; empty for a subpage
	title    string // used when open returns no title
	// open loads the page's subject and returns its title; nil for a page without a subject. An error becomes the response
	// (not found, invalid filter).
	open  func(ctx context.Context, req *pageRequest) (title string, err error)
	parts []part
	// follows marks a page that reads from the primary, to follow a running turn.
	fromPrimary bool
	// parallel marks a page whose parts do not change the request. The server reads such parts two at a time.
	parallel bool
}

// part is a part of a page.
type part struct {
	name     string        // also the id of its element
	interval time.Duration // least refresh interval while a viewer is present; 0 for never
	// refreshOnActivity limits refreshes to one after activity, and one every half minute.
	refreshOnActivity bool
	triggers          changes // changes that refresh it at once; 0: any change, if interval is short
	sharedTemplate    bool    // shared by all pages, with a template of its own name
	load              func(ctx context.Context, req *pageRequest) (any, error)
}

// shortcutKeys has the key that opens a page after the key g.
var shortcutKeys = map[string]string{
	"/": "o", "/activity": "a", "/traces": "t", "/executions": "e", "/flows": "f", "/threads": "h", "/approvals": "p",
	"/skills": "s", "/agents": "n",
	"/automations": "u", "/objectives": "b", "/memory": "m", "/deliveries": "d", "/spend": "c",
	"/lanes": "l", "/operate": "r", "/charts": "v", "/evals": "x",
}

// NavLabel is the page's label in the navigation; empty for none.
func (p page) NavLabel() string { return p.navLabel }

// Path is the page's path.
func (p page) Path() string { return p.path }

// Key is the letter that opens the page; empty for none.
func (p page) Key() string { return shortcutKeys[p.path] }

// phoneIcons has the icons of the pages in the bottom navigation of a phone.
var phoneIcons = map[string]string{"/": "⌂", "/approvals": "✓", "/traces": "≋", "/executions": "▷", "/operate": "›_"}

// PhoneIcon is the page's icon in the bottom navigation of a phone; empty for a page in the menu More.
func (p page) PhoneIcon() string { return phoneIcons[p.path] }

// liveParts lists the parts that change while viewed.
func (p page) liveParts() []part {
	var all []part
	for _, one := range p.parts {
		if one.interval > 0 {
			all = append(all, one)
		}
	}
	return all
}

// pattern returns the path for http.ServeMux. The overview matches "/" alone.
func (p page) pattern() string {
	if p.path == "/" {
		return "/{$}"
	}
	return p.path
}
