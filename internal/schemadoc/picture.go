package schemadoc

import (
	"fmt"
	"html"
	"slices"
	"strings"
)

// The measures of the picture, in pixels.
const (
	pictureColumns = 3
	groupWidth     = 330
	groupGap       = 26 // between groups, and room for a reference to another group
	groupTitle     = 30
	gutter         = 34 // left of the boxes of a group, for references inside it
	boxWidth       = groupWidth - gutter - 12
	boxGap         = 10
	boxTitle       = 22
	lineHeight     = 15
)

// shades are fill and stroke of a group.
var shades = [][2]string{{"#eef3fb", "#3b5b92"}, {"#fff6e0", "#9a7413"}, {"#e9f6ec", "#2e7d43"}, {"#f7ecf5", "#8a3b7c"}}

// box is a table in the picture.
type box struct {
	table *Relation
	group int
	x, y  int
	refs  []reference
}

func (b *box) height() int { return boxTitle + lineHeight*(1+len(b.refs)) + 5 }

// line is the middle of the text of a reference.
func (b *box) line(i int) int { return b.y + boxTitle + lineHeight*(i+1) + 6 }

// group is a noun in the picture.
type group struct {
	noun    *Noun
	x, y, h int
	boxes   []*box
}

// Picture is docs/schema.svg.
func Picture(nouns []*Noun) string {
	groups, height := layout(nouns)
	at := map[string]*box{}
	for _, g := range groups {
		for _, b := range g.boxes {
			at[b.table.Name] = b
		}
	}
	width := pictureColumns*(groupWidth+groupGap) + groupGap
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" `+
		`font-family="sans-serif" font-size="12" role="img" `+
		`aria-label="The tables of the schema by noun, with their keys and references">`+"\n", width, height)
	b.WriteString("<!-- Written by go test ./migrations -run TestTheSchemaPage -update. Do not edit. -->\n")
	b.WriteString(`<defs><marker id="to" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" ` +
		`orient="auto"><path d="M0 0L8 4L0 8z" fill="#444444"/></marker></defs>` + "\n")
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="#ffffff"/>`+"\n", width, height)
	for i, g := range groups {
		g.draw(&b, shades[i%len(shades)])
	}
	arrows(&b, groups, at)
	b.WriteString("</svg>\n")
	return b.String()
}

// layout places the groups in columns, in reading order.
func layout(nouns []*Noun) (groups []*group, height int) {
	total := 0
	for _, n := range nouns {
		if len(n.Tables) == 0 {
			continue
		}
		g := &group{noun: n, h: groupTitle}
		for _, t := range n.Tables {
			b := &box{table: t, group: len(groups), y: g.h}
			for _, f := range t.references() {
				if f.firm || f.target != t.Name {
					b.refs = append(b.refs, f)
				}
			}
			g.boxes, g.h = append(g.boxes, b), g.h+b.height()+boxGap
		}
		groups, total = append(groups, g), total+g.h+groupGap
	}
	column, y := 0, groupGap
	for _, g := range groups {
		if y+g.h/2 > total/pictureColumns && column < pictureColumns-1 {
			column, y = column+1, groupGap
		}
		g.x, g.y = groupGap+column*(groupWidth+groupGap), y
		for _, b := range g.boxes {
			b.x, b.y = g.x+gutter, b.y+g.y
		}
		y += g.h + groupGap
		height = max(height, y)
	}
	return groups, height
}

func (g *group) draw(b *strings.Builder, shade [2]string) {
	frame(b, g.x, g.y, groupWidth, g.h, fmt.Sprintf(`rx="8" fill="%s" stroke="%s"`, shade[0], shade[1]))
	words(b, g.x+gutter, g.y+21, fmt.Sprintf(`font-size="15" font-weight="bold" fill="%s"`, shade[1]), g.noun.Title)
	for _, x := range g.boxes {
		frame(b, x.x, x.y, boxWidth, x.height(), fmt.Sprintf(`rx="4" fill="#ffffff" stroke="%s"`, shade[1]))
		words(b, x.x+8, x.y+16, `font-size="13" font-weight="bold" fill="#222222"`, x.table.Name)
		key := strings.Join(x.table.key(), ", ")
		words(b, x.x+8, x.line(-1)+4, `fill="#222222" text-decoration="underline"`, key)
		for i, f := range x.refs {
			style := `fill="#222222"`
			if !f.firm {
				style = `fill="#555555" font-style="italic"`
			}
			words(b, x.x+8, x.line(i)+4, style, strings.Join(f.columns, ", ")+" → "+f.target)
		}
	}
}

func frame(b *strings.Builder, x, y, w, h int, style string) {
	fmt.Fprintf(b, `<rect x="%d" y="%d" width="%d" height="%d" %s/>`+"\n", x, y, w, h, style)
}

// words writes a line of text that fits into a box.
func words(b *strings.Builder, x, y int, style, text string) {
	const most = 45
	if r := []rune(text); len(r) > most {
		text = string(r[:most-1]) + "…"
	}
	fmt.Fprintf(b, `<text x="%d" y="%d" %s>%s</text>`+"\n", x, y, style, html.EscapeString(text))
}

// arrows draws the foreign keys: inside a group in its gutter, else around or between the groups.
func arrows(b *strings.Builder, groups []*group, at map[string]*box) {
	b.WriteString(`<g stroke="#444444" fill="none" marker-end="url(#to)">` + "\n")
	for _, g := range groups {
		var taken [][3]int // lane of the gutter, top, bottom
		for _, child := range g.boxes {
			for i, f := range child.refs {
				parent := at[f.target]
				if !f.firm || parent == nil {
					continue
				}
				from, to := child.line(i), parent.y+boxTitle/2
				switch {
				case parent.group == child.group:
					lane := free(&taken, min(from, to), max(from, to))
					x := child.x - 10 - 7*lane
					fmt.Fprintf(b, `<path d="M%d %dH%dV%dH%d"/>`+"\n", child.x, from, x, to+2*lane-4, parent.x)
				case parent.x == child.x:
					fmt.Fprintf(b, `<path d="M%d %dH%dV%dH%d"/>`+"\n", child.x, from, g.x-groupGap/2, to, parent.x)
				case parent.x < child.x:
					curve(b, child.x, from, parent.x+boxWidth, to, -60)
				default:
					curve(b, child.x+boxWidth, from, parent.x, to, 60)
				}
			}
		}
	}
	b.WriteString("</g>\n")
}

// curve draws an arrow between columns of the picture.
func curve(b *strings.Builder, x, y, toX, toY, bend int) {
	fmt.Fprintf(b, `<path d="M%d %dC%d %d %d %d %d %d"/>`+"\n", x, y, x+bend, y, toX-bend, toY, toX, toY)
}

// free takes the first lane of a gutter in which nothing stands between top and bottom.
func free(taken *[][3]int, top, bottom int) int {
	for lane := 0; ; lane++ {
		crosses := func(t [3]int) bool { return t[0] == lane && t[1] <= bottom && top <= t[2] }
		if !slices.ContainsFunc(*taken, crosses) {
			*taken = append(*taken, [3]int{lane, top, bottom})
			return lane
		}
	}
}
